"""A small dry run with an 8B model's sizes: memory is not touched, and the library's GEMMs are not
computed. Both hold on all threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from kernels import ops

Make = Callable[..., Tensor]


@contextmanager
def lazy_memory() -> Iterator[None]:
    """Inside, `torch.empty` and `torch.zeros` make zeros on the CPU whose pages the system gives
    once they are touched. torch itself writes its zeros.
    """
    with ExitStack() as stack:
        for name in ("empty", "zeros"):
            make = getattr(torch, name)
            stack.enter_context(patch.object(torch, name, _lazy(make)))
        yield


def _lazy(make: Make) -> Make:
    def made(
        *size: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any
    ) -> Tensor:
        if options or torch.device(device or torch.get_default_device()).type != "cpu":
            return make(*size, dtype=dtype, device=device, **options)
        shape = size if not size or isinstance(size[0], int) else tuple(size[0])
        return lazy_zeros(shape, dtype or torch.get_default_dtype())

    return made


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    num = prod(shape)
    memory = np.zeros(max(num, 1) * dtype.itemsize, np.uint8)  # by calloc, which maps large ones
    return torch.from_numpy(memory).view(dtype)[:num].view(shape)


@contextmanager
def library_products() -> Iterator[None]:
    """Inside, the fast mode multiplies by the library, as on CUDA; it returns zeros."""
    mm = torch.mm

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = *x.shape[:-1], weight.shape[0]
        return x.new_empty(shape) if x.is_meta else lazy_zeros(shape, x.dtype)

    def wide_product(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        if x.is_meta or "out_dtype" not in options:
            return mm(x, weight, **options)
        return lazy_zeros((len(x), weight.shape[1]), options["out_dtype"])

    def is_for_library(x: Tensor, *, is_batch_invariant: bool) -> bool:
        return not is_batch_invariant

    with (
        patch.object(torch.nn.functional, "linear", product),
        patch.object(torch, "mm", wide_product),  # CPUs have none
        patch.object(ops, "_is_for_library", is_for_library),
    ):
        yield
