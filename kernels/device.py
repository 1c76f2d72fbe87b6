"""Where Triton's kernels run: on CUDA, and, for proof, on the CPU under Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

# Read when `triton.jit` decorates: it must be set before the process imports a kernel.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def has_triton_device() -> bool:
    return find_spec("triton") is not None and (IS_INTERPRETED or torch.cuda.is_available())
