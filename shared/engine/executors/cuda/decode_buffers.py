"""The inputs of a decode step at fixed addresses, where a CUDA graph reads them.

All arrays of a step lie in one buffer of the device and in one of the host, so that they travel as
one copy. Rows after those of the step are padding: they have no context, and store no KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.layers.attention_inputs import (
    ALIGNMENT,
    AttentionInputs,
    DecodeRows,
    LayerKind,
    lower_bounds,
    query_factors,
)
from shared.engine.models.device_step import DeviceStepInputs, token_sources
from shared.engine.sampling.sampler import SAMPLING_COLUMNS, as_signed
from shared.engine.step import SAMPLING_ROW, StepInputs, sampling_rows

COLUMNS = ("token_ids", "token_sources", "positions", "context_lens")
SKIPPED_SLOT = -1
OF_TORCH = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}
Arrays: TypeAlias = dict[str, NDArray[Any]]
Fields: TypeAlias = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]


class DecodeShape(NamedTuple):
    """Steps of one shape share a graph. `num_blocks` is the width of the block tables."""

    num_rows: int
    num_blocks: int
    is_drawn: bool  # the device samples; else it returns logits
    is_greedy: bool  # all rows are


def fields_of(shape: DecodeShape, num_groups: int, kinds: Sequence[LayerKind]) -> Fields:
    """Returns the dtype and the shape of each array."""
    rows, integer = shape.num_rows, np.dtype(np.int64)
    found: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    for name in COLUMNS:
        found[name] = integer, (rows,)
    for group in range(num_groups):
        found[f"slots {group}"] = integer, (rows,)
        found[f"table {group}"] = np.dtype(np.int32), (rows, shape.num_blocks)
    for index, kind in enumerate(kinds):
        if kind.reach is not None:
            found[f"lower {index}"] = np.dtype(np.int32), (rows,)
        if kind.temperature is not None:
            found[f"factors {index}"] = np.dtype(np.float32), (rows,)
    if shape.is_drawn and not shape.is_greedy:
        for name in SAMPLING_COLUMNS:
            found[name] = as_signed(np.empty(0, SAMPLING_ROW[name])).dtype, (rows,)
    return found


def num_bytes_of(fields: Fields) -> int:
    return sum(_padded(prod(shape) * dtype.itemsize) for dtype, shape in fields.values())


def arrays_in(buffer: Tensor, fields: Fields) -> dict[str, Tensor]:
    """Returns each array as a part of `buffer`, at a multiple of 16 bytes."""
    found, begin = {}, 0
    for name, (dtype, shape) in fields.items():
        size = prod(shape) * dtype.itemsize
        found[name] = buffer[begin : begin + size].view(OF_TORCH[dtype.type]).view(shape)
        begin += _padded(size)
    return found


def fill(
    arrays: Arrays, inputs: StepInputs | None, kinds: Sequence[LayerKind], num_last: int
) -> None:
    """Writes the rows of a step, and padding after them; with None only padding. `num_last` is the
    length of `DeviceStepInputs.last_tokens`.
    """
    rows = 0 if inputs is None else len(inputs.input_ids)
    for name in COLUMNS:
        arrays[name][rows:] = 0  # any source will do
    for name, array in arrays.items():
        if name.startswith("slots"):
            array[rows:] = SKIPPED_SLOT
        elif name.startswith(("lower", "factors")):
            array[rows:] = 0
    _fill_sampling(arrays, inputs, rows)
    if inputs is None:
        return
    arrays["token_ids"][:rows] = inputs.input_ids
    arrays["token_sources"][:rows] = token_sources(inputs.input_ids, num_last)
    arrays["positions"][:rows] = inputs.positions
    arrays["context_lens"][:rows] = inputs.context_lens
    for group, (slots, table) in enumerate(
        zip(inputs.slot_mapping, inputs.block_tables, strict=True)
    ):
        arrays[f"slots {group}"][:rows] = slots
        own = arrays[f"table {group}"]
        width = min(own.shape[1], table.shape[1])  # what is cut off has no tokens
        own[:rows, :width] = table[:, :width]
    for index, kind in enumerate(kinds):
        if kind.reach is not None:
            arrays[f"lower {index}"][:rows] = lower_bounds(kind.reach, inputs.positions)
        if kind.temperature is not None:
            factors = query_factors(kind.temperature, inputs.positions)
            arrays[f"factors {index}"][:rows] = factors


def _fill_sampling(arrays: Arrays, inputs: StepInputs | None, rows: int) -> None:
    if SAMPLING_COLUMNS[0] not in arrays:
        return
    padding = sampling_rows(1)[0]
    for name in SAMPLING_COLUMNS:
        arrays[name][rows:] = padding[name]
        if inputs is not None:
            arrays[name][:rows] = as_signed(inputs.sampling.rows[name])


def step_inputs(
    arrays: Mapping[str, Tensor],
    shape: DecodeShape,
    kinds: Sequence[LayerKind],
    kind_of_layer: Sequence[int],
    last_tokens: Tensor,
) -> DeviceStepInputs:
    """Returns the inputs of a step that reads these arrays. Every row samples."""
    of_kinds = [_attention(arrays, index, kind) for index, kind in enumerate(kinds)]
    columns = None
    if shape.is_drawn and not shape.is_greedy:
        columns = [arrays[name] for name in SAMPLING_COLUMNS]
    return DeviceStepInputs(
        token_ids=arrays["token_ids"],
        positions=arrays["positions"],
        attention=tuple(of_kinds[kind] for kind in kind_of_layer),
        logits_rows=torch.arange(shape.num_rows, device=arrays["token_ids"].device),
        samples_on_device=shape.is_drawn,
        sampling=columns,
        last_tokens=last_tokens,
        token_sources=arrays["token_sources"],
    )


def _attention(arrays: Mapping[str, Tensor], index: int, kind: LayerKind) -> AttentionInputs:
    lower = arrays.get(f"lower {index}")
    decode = DecodeRows(arrays[f"table {kind.group}"], arrays["context_lens"], lower)
    return AttentionInputs(
        arrays[f"slots {kind.group}"], None, decode, arrays.get(f"factors {index}")
    )


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
