"""Where Triton's kernels run: on CUDA, and, for proof, on the CPU under Triton's interpreter."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

# Read when `triton.jit` decorates: it must be set before the process imports a kernel.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")

_CHECKED = 16  # elements of the check at the start


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


class TritonUnusable(RuntimeError):
    """Kernels cannot be compiled for this device, or loaded, or compute something else."""


def check_triton(device: torch.device) -> None:
    """Compiles, loads and runs one small kernel: about a second, at the start and not with the
    first request. Raises TritonUnusable, which says what is missing.
    """
    counts = torch.arange(_CHECKED, dtype=torch.int32, device=device)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            _compiled_increment()[(1,)](counts, NUM=_CHECKED, enable_fp_fusion=True)
        found = counts.tolist()
    except Exception as error:  # of the compiler, of the loader or of the driver
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise TritonUnusable(
            f"Triton cannot run a kernel on {device}: {reason}. It needs a C compiler (Debian: gcc "
            "and libc6-dev; or CC), Python's headers and a directory for what it compiles that may "
            "be written to and executed from (TRITON_CACHE_DIR)."
        ) from error
    if found != list(range(1, _CHECKED + 1)):
        raise TritonUnusable(f"a Triton kernel on {device} counted {found}, not 1 to {_CHECKED}")


def _compiled_increment() -> Any:
    """Not at import: processes without a GPU need no Triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def increment(counts_ptr, NUM: tl.constexpr):  # type: ignore[no-untyped-def]
        place = counts_ptr + tl.arange(0, NUM)
        tl.store(place, tl.load(place) + 1)

    return increment
