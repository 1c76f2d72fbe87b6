"""The devices of Triton's kernels: CUDA, and for tests the CPU under Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

# Read when `triton.jit` decorates, so it must be set before the process imports a kernel.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")

_CHECKED = 16  # elements of the startup check


def has_triton_device() -> bool:
    return find_spec("triton") is not None and (IS_INTERPRETED or torch.cuda.is_available())


def computing_device(device: torch.device) -> torch.device:
    """The meta device stands for the thread's CUDA device, see compile_on_meta.py."""
    if device.type == "meta" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copies an array to the device. On CUDA it goes through page-locked memory, so that the host
    waits neither for the copy nor for the work before it.
    """
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def compute_capability(device: torch.device) -> int:
    """80, 90, ...; under the interpreter that of the device that the kernels target."""
    return _compute_capability(computing_device(device))


@cache
def _compute_capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def num_processors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors, which divides the work; 1 under
    the interpreter.
    """
    return _num_processors(computing_device(device))


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def on_triton_compile(handler: Callable[[], None]) -> None:
    """Calls `handler` before a kernel is compiled in this process, on the thread that launches it.

    A handler replaces the one before. Kernels in Triton's cache on disk are reported, too.
    """
    from triton import knobs

    def hook(**_: object) -> bool:
        handler()
        return False  # Triton compiles it

    knobs.runtime.jit_cache_hook = hook


class TritonUnusable(RuntimeError):
    """Kernels for this device cannot be compiled or loaded, or compute wrong results."""


def check_triton(device: torch.device) -> None:
    """Compiles, loads and runs one small kernel: takes about a second at startup instead of in the
    first request. Raises TritonUnusable, which names what is missing.
    """
    counts = torch.arange(_CHECKED, dtype=torch.int32, device=device)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            _compiled_increment()[(1,)](counts, NUM=_CHECKED, enable_fp_fusion=True)
        found = counts.tolist()
    except Exception as error:  # raised by the compiler, the loader or the driver
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise TritonUnusable(
            f"Triton cannot run a kernel on {device}: {reason}. It needs a C compiler (Debian: gcc "
            "and libc6-dev; or CC), Python's headers and a writable and executable directory for "
            "compiled files (TRITON_CACHE_DIR)."
        ) from error
    if found != list(range(1, _CHECKED + 1)):
        raise TritonUnusable(f"a Triton kernel on {device} returned {found}, not 1 to {_CHECKED}")


def _compiled_increment() -> Any:
    """Defines the kernel. Not at import: processes without a GPU need no Triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def increment(counts_ptr, NUM: tl.constexpr):  # type: ignore[no-untyped-def]
        place = counts_ptr + tl.arange(0, NUM)
        tl.store(place, tl.load(place) + 1)

    return increment
