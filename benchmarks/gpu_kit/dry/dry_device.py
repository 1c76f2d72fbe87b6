"""A device for dry runs: CPU tensors go to Triton's kernels, whose launches a fake driver counts.

Products of the library return zeros, as an 8B model's take hours on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_kit.dry.dry_tensors import lazy_memory, library_products
from tests.support.kernels.fake_driver import FakeDriver, Form
from tests.support.kernels.triton_ops import triton_ops

aten = torch.ops.aten


def _rows_by_columns(a: Tensor, b: Tensor) -> tuple[int, ...]:
    return *a.shape[:-1], b.shape[-1]


# Operator -> the shape of its result from its tensors.
PRODUCTS: Mapping[Any, Callable[..., tuple[int, ...]]] = {
    aten.mm.default: _rows_by_columns,
    aten.mm.dtype: lambda a, b, dtype: _rows_by_columns(a, b),
    aten.bmm.default: _rows_by_columns,
    aten.addmm.default: lambda bias, a, b: _rows_by_columns(a, b),
    aten.linear.default: lambda x, weight, bias=None: (*x.shape[:-1], weight.shape[0]),
}


class NoProducts(TorchDispatchMode):
    """Replaces the library's products by zeros of the same shape."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its compiler for a mode, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        shape_of = PRODUCTS.get(function)
        if shape_of is None or args[0].is_meta:
            return function(*args, **(kwargs or {}))
        return torch.zeros(shape_of(*args), dtype=_dtype_of(function, args))


def _dtype_of(function: Any, args: Any) -> torch.dtype:
    dtype: torch.dtype = args[2] if function is aten.mm.dtype else args[0].dtype
    return dtype


@contextmanager
def dry_device(form: Form) -> Iterator[FakeDriver]:
    """Replaces the device by a fake driver that compiles kernels to `form` (see `fake_driver`)."""
    with ExitStack() as stack:
        driver = stack.enter_context(triton_ops(form))
        stack.enter_context(NoProducts())
        stack.enter_context(lazy_memory())
        stack.enter_context(library_products())
        yield driver
