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

    Raises BadTensor. It runs several times a launch: what fits is checked with few calls.
    """
    found = tensor.shape
    if shape != found and not _fits(shape, found):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise BadTensor(f"{name} has shape {list(found)}, not [{wanted}]")
    if dtype is not None and tensor.dtype is not dtype:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else dtype
        if tensor.dtype not in allowed:
            raise BadTensor(f"{name} is {tensor.dtype}, not {' or '.join(map(str, allowed))}")
    if device is not None and tensor.device != device:
        raise BadTensor(f"{name} is on {tensor.device}, not on {device}")
    if not tensor.is_contiguous():
        _expect_strides(name, tensor, is_contiguous)


def _fits(shape: Sequence[int | None], found: Sequence[int]) -> bool:
    if len(shape) != len(found):
        return False
    for index, want in enumerate(shape):  # noqa: SIM110  `all` takes twice the time
        if want is not None and want != found[index]:
            return False
    return True


def _expect_strides(name: str, tensor: Tensor, is_contiguous: bool) -> None:
    if tensor.numel() and tensor.ndim and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise BadTensor(f"{name} is not dense in its last dimension: strides {tensor.stride()}")
    if is_contiguous:
        raise BadTensor(f"{name} is not contiguous: strides {tensor.stride()}")
