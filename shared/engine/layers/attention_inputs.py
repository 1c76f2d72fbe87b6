"""The inputs of all attention layers of one step, computed once per step.

A step's tokens are split by the query length of their sequence: single tokens, which come first, go
to decode attention, queries of two or more tokens to prefill attention. The CPU has one kernel for
both, which computes a mixed step in any order without a split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    block_tables: Tensor  # [S', max_blocks]
    cu_seqlens_q: Tensor  # [S' + 1]
    context_lens: Tensor  # [S']
    lower: Tensor | None  # [T'] the first visible position of each token; None: 0


@dataclass(frozen=True, slots=True)
class DecodeRows:
    block_tables: Tensor  # [S', max_blocks]
    context_lens: Tensor  # [S']
    lower: Tensor | None  # [S']


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    slot_mapping: Tensor  # [T]
    prefill: PrefillRows | None  # of the batch's last T' tokens
    decode: DecodeRows | None  # of its first S' tokens
    query_factors: Tensor | None = None  # [T] FP32


def build_attention_inputs(
    inputs: StepInputs, device: torch.device, kinds: Sequence[LayerKind] = (LayerKind(),)
) -> tuple[AttentionInputs, ...]:
    """Returns the inputs of each kind of layer. Raises ValueError if a single token comes after a
    query of several.
    """
    num_single = _num_single(inputs, device)
    prefill = _prefill_rows(inputs, num_single, device)
    decode = _decode_rows(inputs, num_single, device)
    slot_mapping = _by_group(inputs.slot_mapping, device)
    found = []
    for group, reach, temperature in kinds:
        lower = lower_bounds(reach, inputs.positions)
        first, rest = (None, None) if lower is None else (lower[:num_single], lower[num_single:])
        found.append(
            AttentionInputs(
                slot_mapping[group],
                None if prefill is None else replace(prefill[group], lower=_on(device, rest)),
                None if decode is None else replace(decode[group], lower=_on(device, first)),
                _on(device, query_factors(temperature, inputs.positions)),
            )
        )
    return tuple(found)


def _num_single(inputs: StepInputs, device: torch.device) -> int:
    """Returns the number of tokens for decode attention."""
    is_single = inputs.query_lens == 1
    num_single = int(np.count_nonzero(is_single))
    if num_single < len(is_single) and _has_cpu_kernels(device):
        return 0
    if not is_single[:num_single].all():
        raise ValueError("queries of single tokens must come first")
    return num_single


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


def _aligned(values: NDArray[Any], device: torch.device) -> Tensor:
    """Returns values that begin at an aligned address, unlike a part of an array: see
    `_by_group`.
    """
    return to_device(values.copy(), device)


def _on(device: torch.device, values: NDArray[Any] | None) -> Tensor | None:
    return None if values is None else _aligned(values, device)


def _tables(tables: NDArray[np.int64], device: torch.device) -> Tensor:
    """Returns block tables [G, S', max_blocks], of int32 where kernels read it as well as int64."""
    return _by_group(tables if _has_cpu_kernels(device) else tables.astype(np.int32), device)


def _by_group(values: NDArray[Any], device: torch.device) -> Tensor:
    """values [G, ..., n] on the device, where the part of each group starts at a multiple of 16
    bytes: Triton compiles other kernels for arguments that do not.
    """
    if _has_cpu_kernels(device) or len(values) == 1:
        return to_device(values, device)
    size = values.shape[-1]
    ends = [(0, 0)] * (values.ndim - 1) + [(0, -size % (ALIGNMENT // values.itemsize))]
    # contiguous first: numpy pads others in their order, in which groups may lie between each other
    return to_device(np.pad(np.ascontiguousarray(values), ends), device)[..., :size]


def _has_cpu_kernels(device: torch.device) -> bool:
    return device.type == "cpu" and not IS_INTERPRETED


def _prefill_rows(inputs: StepInputs, first: int, device: torch.device) -> list[PrefillRows] | None:
    """Returns those of each group, without lower bounds."""
    lens = inputs.query_lens[first:]
    if not len(lens):
        return None
    cu_seqlens_q = to_device(np.concatenate(([0], np.cumsum(lens))), device)
    context_lens = _aligned(inputs.context_lens[first:], device)
    tables = _tables(inputs.block_tables[:, first:], device)
    return [PrefillRows(each, cu_seqlens_q, context_lens, None) for each in tables]


def _decode_rows(
    inputs: StepInputs, num_rows: int, device: torch.device
) -> list[DecodeRows] | None:
    """Returns those of each group, without lower bounds."""
    if not num_rows:
        return None
    context_lens = _aligned(inputs.context_lens[:num_rows], device)
    tables = _tables(inputs.block_tables[:, :num_rows], device)
    return [DecodeRows(each, context_lens, None) for each in tables]
