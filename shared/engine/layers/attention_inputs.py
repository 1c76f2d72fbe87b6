"""The inputs of all attention layers of one step, computed once per step.

A step's tokens are split by the query length of their sequence: queries of two or more tokens go to
prefill attention, single tokens to decode attention. The CPU has one kernel for both, which
computes a mixed step without a split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.device import IS_INTERPRETED
from shared.engine.runner import StepInputs
from shared.kv_layout import Chunk, Reach, Window


@dataclass(frozen=True, slots=True)
class PrefillRows:
    rows: Tensor | None  # [T'] indices into the flat batch; None = the whole batch in order
    block_tables: Tensor  # [S', max_blocks]
    cu_seqlens_q: Tensor  # [S' + 1]
    context_lens: Tensor  # [S']
    lower: Tensor | None  # [T'] the first visible position of each token; None: 0


@dataclass(frozen=True, slots=True)
class DecodeRows:
    rows: Tensor | None  # [S'] like PrefillRows.rows
    block_tables: Tensor  # [S', max_blocks]
    context_lens: Tensor  # [S']
    lower: Tensor | None  # [S']


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    slot_mapping: Tensor  # [T]
    prefill: PrefillRows | None
    decode: DecodeRows | None


def build_attention_inputs(
    inputs: StepInputs, device: torch.device, reaches: Sequence[Reach] = (None,)
) -> tuple[AttentionInputs, ...]:
    """One for each of `reaches`."""
    starts = np.concatenate(([0], np.cumsum(inputs.query_lens)))
    runs = np.flatnonzero(inputs.query_lens > 1)
    single = np.flatnonzero(inputs.query_lens == 1)
    if len(runs) and device.type == "cpu" and not IS_INTERPRETED:
        runs, single = np.arange(len(inputs.query_lens)), single[:0]
    slot_mapping = torch.from_numpy(inputs.slot_mapping).to(device)
    prefill = _prefill_rows(inputs, runs, starts, device) if len(runs) else None
    decode = _decode_rows(inputs, single, starts, device) if len(single) else None
    found = []
    for reach in reaches:
        lower = _lower_bounds(reach, inputs.positions, device)
        found.append(
            AttentionInputs(
                slot_mapping,
                None if prefill is None else _bounded_prefill(prefill, lower),
                None if decode is None else _bounded_decode(decode, lower),
            )
        )
    return tuple(found)


def lower_bounds(reach: Reach, positions: NDArray[np.int64]) -> NDArray[np.int32] | None:
    """The first position that each of `positions` sees, of the same shape; None: all see all."""
    match reach:
        case Window(tokens=tokens):
            return np.maximum(positions - (tokens - 1), 0).astype(np.int32)
        case Chunk(tokens=tokens):
            return (positions // tokens * tokens).astype(np.int32)
    return None


def _lower_bounds(
    reach: Reach, positions: NDArray[np.int64], device: torch.device
) -> Tensor | None:
    lower = lower_bounds(reach, positions)
    return None if lower is None else torch.from_numpy(lower).to(device)


def _of_rows(lower: Tensor, rows: Tensor | None) -> Tensor:
    return lower if rows is None else lower.index_select(0, rows)


def _bounded_prefill(rows: PrefillRows, lower: Tensor | None) -> PrefillRows:
    if lower is None:
        return rows
    lens = rows.cu_seqlens_q, rows.context_lens
    return PrefillRows(rows.rows, rows.block_tables, *lens, _of_rows(lower, rows.rows))


def _bounded_decode(rows: DecodeRows, lower: Tensor | None) -> DecodeRows:
    if lower is None:
        return rows
    return DecodeRows(rows.rows, rows.block_tables, rows.context_lens, _of_rows(lower, rows.rows))


def _prefill_rows(
    inputs: StepInputs, index: NDArray[np.int64], starts: NDArray[np.int64], device: torch.device
) -> PrefillRows:
    lens = inputs.query_lens[index]
    rows = None
    if len(index) < len(inputs.query_lens):
        flat = [np.arange(starts[i], starts[i + 1]) for i in index]
        rows = torch.from_numpy(np.concatenate(flat)).to(device)
    return PrefillRows(
        rows=rows,
        block_tables=torch.from_numpy(inputs.block_tables[index]).to(device),
        cu_seqlens_q=torch.from_numpy(np.concatenate(([0], np.cumsum(lens)))).to(device),
        context_lens=torch.from_numpy(inputs.context_lens[index]).to(device),
        lower=None,
    )


def _decode_rows(
    inputs: StepInputs, index: NDArray[np.int64], starts: NDArray[np.int64], device: torch.device
) -> DecodeRows:
    has_all_rows = len(index) == len(inputs.query_lens)
    return DecodeRows(
        rows=None if has_all_rows else torch.from_numpy(starts[index]).to(device),
        block_tables=torch.from_numpy(inputs.block_tables[index]).to(device),
        context_lens=torch.from_numpy(inputs.context_lens[index]).to(device),
        lower=None,
    )
