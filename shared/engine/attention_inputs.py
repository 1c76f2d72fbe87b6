"""What every attention layer of one step needs to know, computed once a step.

A step's tokens are split by the length of their sequence's query: runs of two or more go to
prefill attention, single ones to decode attention in groups of like context length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.runner import StepInputs

# FP32 keys and values of a decode group, gathered: larger groups fall out of the cache.
MAX_GROUP_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class PrefillRows:
    rows: Tensor | None  # [T'] indices into the flat batch; None = the whole batch in order
    block_tables: Tensor  # [S', max_blocks]
    cu_seqlens_q: Tensor  # [S' + 1]
    context_lens: Tensor  # [S']


@dataclass(frozen=True, slots=True)
class DecodeRows:
    rows: Tensor | None  # [S'] as above
    block_tables: Tensor  # [S', max_blocks], cut to the longest of the group
    context_lens: Tensor  # [S']


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    slot_mapping: Tensor  # [T]
    prefill: PrefillRows | None
    decode: tuple[DecodeRows, ...]


def build_attention_inputs(
    inputs: StepInputs, *, block_size: int, token_bytes: int, device: torch.device
) -> AttentionInputs:
    """`token_bytes`: keys and values of one token of one layer in FP32."""
    starts = np.concatenate(([0], np.cumsum(inputs.query_lens)))
    prefill = np.flatnonzero(inputs.query_lens > 1)
    single = np.flatnonzero(inputs.query_lens == 1)
    return AttentionInputs(
        slot_mapping=torch.from_numpy(inputs.slot_mapping).to(device),
        prefill=_prefill_rows(inputs, prefill, starts, device) if len(prefill) else None,
        decode=tuple(
            _decode_rows(inputs, group, starts, block_size, device)
            for group in _decode_groups(inputs.context_lens, single, token_bytes)
        ),
    )


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
        cu_seqlens_q=torch.from_numpy(np.concatenate(([0], np.cumsum(lens)))),
        context_lens=torch.from_numpy(inputs.context_lens[index]),
    )


def _decode_groups(
    context_lens: NDArray[np.int64], single: NDArray[np.int64], token_bytes: int
) -> list[NDArray[np.int64]]:
    """Sequences by falling context length, cut so that each group's padded KV stays small."""
    if not len(single):
        return []
    if len(single) * int(context_lens[single].max()) * token_bytes <= MAX_GROUP_BYTES:
        return [single]
    ordered = single[np.argsort(-context_lens[single], kind="stable")]
    groups = []
    while len(ordered):
        size = max(MAX_GROUP_BYTES // (int(context_lens[ordered[0]]) * token_bytes), 1)
        groups.append(ordered[:size])
        ordered = ordered[size:]
    return groups


def _decode_rows(
    inputs: StepInputs,
    group: NDArray[np.int64],
    starts: NDArray[np.int64],
    block_size: int,
    device: torch.device,
) -> DecodeRows:
    context_lens = inputs.context_lens[group]
    num_columns = -(-int(context_lens.max()) // block_size)
    is_whole = len(group) == len(inputs.input_ids)
    return DecodeRows(
        rows=None
        if is_whole and bool((np.diff(group) > 0).all())
        else torch.from_numpy(starts[group]).to(device),
        block_tables=torch.from_numpy(inputs.block_tables[group, :num_columns]).to(device),
        context_lens=torch.from_numpy(context_lens).to(device),
    )
