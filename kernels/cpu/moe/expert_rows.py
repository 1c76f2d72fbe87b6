"""Sorts the choices of tokens by expert, and adds the experts' results of each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.simd.dtype_convert import load_numbers, store_numbers
from kernels.cpu.simd.f32x32 import NUM_FLOATS
from kernels.cpu.simd.intrinsics import FEW_ROWS, array
from kernels.cpu.simd.tasks import num_tasks
from kernels.routing import ExpertRows

_f32 = np.float32


def sort_by_expert(ids: Tensor, num_experts: int, sums: Tensor | None = None) -> ExpertRows:
    """Computes kernels.torch_ops.expert_rows.sort_by_expert."""
    tokens = torch.empty(ids.numel(), dtype=torch.int64)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int64)
    places = torch.empty_like(ids)
    _sort(ids.numpy(), tokens.numpy(), offsets.numpy(), places.numpy())
    if sums is not None:
        sums += offsets
    return ExpertRows(tokens, offsets, places)


@compiled()
def _sort(ids: Any, tokens: Any, offsets: Any, places: Any) -> None:
    for token in range(len(ids)):
        for slot in range(ids.shape[1]):
            offsets[ids[token, slot] + 1] += 1
    for expert in range(1, len(offsets)):
        offsets[expert] += offsets[expert - 1]
    following = offsets.copy()
    for token in range(len(ids)):
        for slot in range(ids.shape[1]):
            place = following[ids[token, slot]]
            following[ids[token, slot]] += 1
            tokens[place], places[token, slot] = token, place


def add_experts(
    y: Tensor, places: Tensor, weights: Tensor | None, shared: Tensor | None, width: int
) -> Tensor:
    """Computes kernels.torch_ops.expert_rows.add_experts."""
    out = y.new_empty(len(places), width)
    factors = torch.ones(places.shape) if weights is None else weights
    added = out[:0] if shared is None else shared.contiguous()
    tasks = 1 if len(out) <= FEW_ROWS else num_tasks(len(out))
    _add(array(y), places.numpy(), factors.numpy(), array(added), tasks, array(out))
    return out


@compiled(parallel=True)
def _add(y: Any, places: Any, weights: Any, shared: Any, num_tasks: int, out: Any) -> None:
    for task in prange(num_tasks):
        first, end = len(out) * task // num_tasks, len(out) * (task + 1) // num_tasks
        for row in range(first, end):
            add_row(y, places[row], weights[row], shared, row, out)


@compiled()
def add_row(y: Any, places: Any, weights: Any, shared: Any, row: int, out: Any) -> None:
    width, size, row_bytes = out.shape[1], out.itemsize, y.strides[0]
    for column in range(0, width, NUM_FLOATS):
        count, at = width - column, column * size
        y_at = y.ctypes.data + at
        total = load_numbers(y_at + places[0] * row_bytes, out.dtype, count) * weights[0]
        for slot in range(1, len(places)):
            found = load_numbers(y_at + places[slot] * row_bytes, out.dtype, count)
            total = total + found * weights[slot]
        if len(shared):
            shared_at = shared.ctypes.data + row * width * size + at
            total = total + load_numbers(shared_at, out.dtype, count)
        store_numbers(total, out.ctypes.data + row * width * size + at, out.dtype, count)
