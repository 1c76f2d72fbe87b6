"""Runs a model's Triton kernels on CPU tensors with the fake driver: launched, never computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from kernels import ops
from kernels.gpu.gemm.compressed_linear import compressed_linear, fits_lanes
from kernels.gpu.gemm.decompress import decompress
from kernels.gpu.gemm.fused_rows import fused_rows
from shared.engine.layers import attention_inputs
from tests.support.kernels.fake_driver import FakeDriver, Form, fake_driver
from tests.support.kernels.untouched import untouched_zeros

_OPERATIONS = [each for each in vars(ops).values() if isinstance(each, ops.Operation)]


@contextmanager
def triton_ops(form: Form = "ttir") -> Iterator[FakeDriver]:
    """Inside, CPU tensors go to the kernels of a GPU. Indices that a kernel would have written are
    zeros, as they index tensors afterwards.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(ops, "HAS_TRITON", True))
        for module in (ops, attention_inputs):
            stack.enter_context(patch.object(module, "IS_INTERPRETED", True))
        for function in (compressed_linear, decompress, fused_rows):
            name = {"compressed_linear": "_fused_linear", "decompress": "_triton_decompress"}
            target = name.get(function.__name__, function.__name__)
            stack.enter_context(patch.object(ops, target, function, create=True))
        stack.enter_context(patch.object(ops, "_fits_lanes", fits_lanes, create=True))
        for maker in ("empty", "zeros"):
            stack.enter_context(patch.object(torch, maker, untouched_zeros))
        for each in _OPERATIONS:
            _forget(each)
        stack.callback(lambda: [_forget(each) for each in _OPERATIONS])
        yield stack.enter_context(fake_driver(form))


def _forget(operation: ops.Operation) -> None:  # type: ignore[type-arg]
    for name in ("on_cpu", "elsewhere"):
        vars(operation).pop(name, None)
