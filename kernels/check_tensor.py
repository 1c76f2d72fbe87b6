"""Checks of the tensors that a kernel's wrapper receives. A kernel that reads past its tensors
returns garbage, so each wrapper checks everything that its address arithmetic relies on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDICES = (torch.int64, torch.int32)


class BadTensor(ValueError):
    """Names the wrong tensor of an op, what is wrong with it, and the expected value."""


def expect(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    *,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    is_contiguous: bool = False,
) -> None:
    """Checks a tensor. None in `shape` matches any size. The last dimension must be dense; with
    `is_contiguous`, all dimensions.

    Raises BadTensor.
    """
    is_fitting = len(shape) == tensor.ndim and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not is_fitting:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise BadTensor(f"{name} has shape {list(tensor.shape)}, not [{wanted}]")
    allowed = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if allowed is not None and tensor.dtype not in allowed:
        raise BadTensor(f"{name} is {tensor.dtype}, not {' or '.join(map(str, allowed))}")
    if device is not None and tensor.device != device:
        raise BadTensor(f"{name} is on {tensor.device}, not on {device}")
    if tensor.numel() and tensor.ndim and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise BadTensor(f"{name} is not dense in its last dimension: strides {tensor.stride()}")
    if is_contiguous and not tensor.is_contiguous():
        raise BadTensor(f"{name} is not contiguous: strides {tensor.stride()}")
