"""The numerics of an executor, from its device, dtype and mode."""

from __future__ import annotations

from importlib.metadata import version

import torch

from kernels.device import IS_INTERPRETED, compute_capability
from kernels.ops import cpu_host
from shared.engine.parallel.lanes import NUM_LANES
from shared.numerics import (
    KERNELS_VERSION,
    TRITON_KERNELS_VERSION,
    Activations,
    Mode,
    Numerics,
)


def device_numerics(
    device: torch.device,
    dtype: str,
    mode: Mode,
    activations: Activations = "plain",
    *,
    kv_dtype: str,
) -> Numerics:
    """Returns the numerics of a device. On the CPU its kernels must be compiled before, as a host
    that cannot compile has others.
    """
    has_triton = IS_INTERPRETED or device.type == "cuda"
    kernels_version = TRITON_KERNELS_VERSION if has_triton else KERNELS_VERSION
    parts = [str(kernels_version), f"torch{_release('torch')}"]
    if device.type == "cuda":
        parts.append(f"triton{_release('triton')}")
        name = f"sm{compute_capability(device)}"
    else:
        name = "cpu-interpreted" if IS_INTERPRETED else _cpu_name(dtype)
    # The library multiplies in the fast mode of CUDA, unless nodes of the lane tree are rounded.
    has_lanes = device.type == "cpu" or mode == "exact" or activations == "bf16-exchange"
    lanes = NUM_LANES if has_lanes else 1
    kernels = "-".join(parts)
    return Numerics(
        mode,
        name,
        dtype,
        kernels,
        sum_lanes=lanes,
        activations=activations,
        kv_dtype="" if kv_dtype == dtype else kv_dtype,
    )


def _cpu_name(dtype: str) -> str:
    """Returns the instruction set of the compiled kernels, and what the libraries multiply with:
    they take the weights that the kernels do not, such as those of odd sizes.
    """
    return f"cpu-{cpu_host().instruction_set}-{cpu_host().library_name(dtype)}"


def _release(package: str) -> str:
    """Returns the package's major and minor version."""
    return ".".join(version(package).split(".")[:2])
