"""Where Triton's kernels run: on CUDA, and, for proof, on the CPU under Triton's interpreter."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

# Read when `triton.jit` decorates: it must be set before the process imports a kernel.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def has_triton_device() -> bool:
    return find_spec("triton") is not None and (IS_INTERPRETED or torch.cuda.is_available())


@cache
def compute_capability(device: torch.device) -> int:
    """80, 90, ...; under the interpreter that of the device that the kernels are made for."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors, by which work is divided; few under the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
