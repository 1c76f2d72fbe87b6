"""The inputs of all attention layers of one step, computed once per step.

A step's tokens are split by the query length of their sequence: queries of two or more tokens go to
prefill attention, single tokens to decode attention. The CPU has one kernel for both, which
computes a mixed step without a split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.device import IS_INTERPRETED, to_device
from shared.engine.model_config.model_config import QueryTemperature
from shared.engine.step import StepInputs
from shared.kv_layout import Chunk, Reach, Window

ALIGNMENT = 16  # bytes


class LayerKind(NamedTuple):
    """Layers of one kind have the same inputs."""

    group: int = 0
    reach: Reach = None
    temperature: QueryTemperature | None = None


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
    query_factors: Tensor | None = None  # [T] FP32


def build_attention_inputs(
    inputs: StepInputs, device: torch.device, kinds: Sequence[LayerKind] = (LayerKind(),)
) -> tuple[AttentionInputs, ...]:
    """Returns the inputs of each kind of layer."""
    starts = np.concatenate(([0], np.cumsum(inputs.query_lens)))
    runs = np.flatnonzero(inputs.query_lens > 1)
    single = np.flatnonzero(inputs.query_lens == 1)
    if len(runs) and _has_cpu_kernels(device):
        runs, single = np.arange(len(inputs.query_lens)), single[:0]
    prefill = _PrefillRuns.of(inputs, runs, starts, device) if len(runs) else None
    decode = _DecodeRuns.of(inputs, single, starts, device) if len(single) else None
    found = []
    slot_mapping = _by_group(inputs.slot_mapping, device)
    for group, reach, temperature in kinds:
        lower = _on(device, lower_bounds(reach, inputs.positions))
        found.append(
            AttentionInputs(
                slot_mapping[group],
                None if prefill is None else prefill.rows_of(group, lower),
                None if decode is None else decode.rows_of(group, lower),
                _on(device, query_factors(temperature, inputs.positions)),
            )
        )
    return tuple(found)


def lower_bounds(reach: Reach, positions: NDArray[np.int64]) -> NDArray[np.int32] | None:
    """Returns the first position that each of `positions` sees, of the same shape;
    None: all see all.
    """
    match reach:
        case Window(tokens=tokens):
            return np.maximum(positions - (tokens - 1), 0).astype(np.int32)
        case Chunk(tokens=tokens):
            return (positions // tokens * tokens).astype(np.int32)
    return None


def query_factors(
    temperature: QueryTemperature | None, positions: NDArray[np.int64]
) -> NDArray[np.float32] | None:
    """Returns factors of the shape of `positions`. They are rounded once, so that they do not
    depend on the host.
    """
    if temperature is None:
        return None
    growth = np.log1p((positions + 1) // temperature.floor_scale)
    return (growth * temperature.scale + 1).astype(np.float32)


def _on(device: torch.device, values: NDArray[Any] | None) -> Tensor | None:
    return None if values is None else to_device(values, device)


def _tables(inputs: StepInputs, index: NDArray[np.int64], device: torch.device) -> Tensor:
    """[G, S', max_blocks] of these sequences; int32 where kernels read it as well as int64."""
    tables = inputs.block_tables[:, index]
    return _by_group(tables if _has_cpu_kernels(device) else tables.astype(np.int32), device)


def _by_group(values: NDArray[Any], device: torch.device) -> Tensor:
    """values [G, ..., n] on the device, where the part of each group starts at a multiple of 16
    bytes: Triton compiles other kernels for arguments that do not.
    """
    if _has_cpu_kernels(device) or len(values) == 1:
        return to_device(values, device)
    size = values.shape[-1]
    ends = [(0, 0)] * (values.ndim - 1) + [(0, -size % (ALIGNMENT // values.itemsize))]
    return to_device(np.pad(values, ends), device)[..., :size]


def _has_cpu_kernels(device: torch.device) -> bool:
    return device.type == "cpu" and not IS_INTERPRETED


def _of_rows(lower: Tensor | None, rows: Tensor | None) -> Tensor | None:
    return lower if rows is None or lower is None else lower.index_select(0, rows)


@dataclass(frozen=True, slots=True)
class _PrefillRuns:
    """The part of `PrefillRows` that all groups share; block_tables [G, S', max_blocks]."""

    rows: Tensor | None
    block_tables: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor

    @classmethod
    def of(
        cls,
        inputs: StepInputs,
        index: NDArray[np.int64],
        starts: NDArray[np.int64],
        device: torch.device,
    ) -> Self:
        lens = inputs.query_lens[index]
        rows = None
        if len(index) < len(inputs.query_lens):
            flat = [np.arange(starts[i], starts[i + 1]) for i in index]
            rows = to_device(np.concatenate(flat), device)
        return cls(
            rows=rows,
            block_tables=_tables(inputs, index, device),
            cu_seqlens_q=to_device(np.concatenate(([0], np.cumsum(lens))), device),
            context_lens=to_device(inputs.context_lens[index], device),
        )

    def rows_of(self, group: int, lower: Tensor | None) -> PrefillRows:
        lens = self.cu_seqlens_q, self.context_lens
        return PrefillRows(self.rows, self.block_tables[group], *lens, _of_rows(lower, self.rows))


@dataclass(frozen=True, slots=True)
class _DecodeRuns:
    """The part of `DecodeRows` that all groups share; block_tables [G, S', max_blocks]."""

    rows: Tensor | None
    block_tables: Tensor
    context_lens: Tensor

    @classmethod
    def of(
        cls,
        inputs: StepInputs,
        index: NDArray[np.int64],
        starts: NDArray[np.int64],
        device: torch.device,
    ) -> Self:
        has_all_rows = len(index) == len(inputs.query_lens)
        return cls(
            rows=None if has_all_rows else to_device(starts[index], device),
            block_tables=_tables(inputs, index, device),
            context_lens=to_device(inputs.context_lens[index], device),
        )

    def rows_of(self, group: int, lower: Tensor | None) -> DecodeRows:
        tables = self.block_tables[group]
        return DecodeRows(self.rows, tables, self.context_lens, _of_rows(lower, self.rows))
