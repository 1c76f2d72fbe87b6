"""Attention over the paged cache: project, norm, rotate, store, attend, project."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.ops import decode_attention, prefill_attention, rotate_and_store
from shared.engine.layers.attention_backends.cudnn import Library
from shared.engine.layers.attention_inputs import (
    ALIGNMENT,
    AttentionInputs,
    DecodeRows,
    PrefillRows,
)
from shared.engine.layers.destinations import child_destinations
from shared.engine.layers.linear import Linear, unset_parameter
from shared.engine.layers.norm import RMSNorm
from shared.engine.model_config.model_config import LayerConfig, ModelConfig
from shared.engine.parallel.cuts import head_lanes


class PagedAttention(nn.Module):
    """Attention of each token to the tokens that the step's inputs name for it.

    With `value_dim`, values are the first elements of their keys: see kernels.reference.
    """

    is_batch_invariant = True  # see kernels.reference.prefill_attention
    value_dim: int | None = None
    sinks: nn.Parameter | None  # [num_heads] FP32
    kv_scales: Tensor | None  # [2, num_kv_heads] FP32 of a cache in FP8; of latents one, twice

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.library: Library | None = None  # of prompts' attention, where it can
        self.register_buffer("kv_scales", None, persistent=False)
        self.sinks = None
        if config.has_sinks:
            self.sinks = unset_parameter(config.num_heads, dtype=torch.float32)

    def attend(self, query: Tensor, kv_cache: Tensor, inputs: AttentionInputs) -> Tensor:
        """Rotated queries [T, num_heads, D], whose keys and values are stored -> the same shape,
        or [T, num_heads, value_dim].
        """
        if inputs.query_factors is not None:
            factors = inputs.query_factors[:, None, None]  # FP32, as is the product before rounding
            query = torch.mul(query, factors, out=torch.empty_like(query))
        single, runs = inputs.decode, inputs.prefill
        if single is None:
            assert runs is not None, "a step has at least one token"
            return self._prefill(query, kv_cache, runs)
        if runs is None:
            return self._decode(query, kv_cache, single)
        num_single = len(single.context_lens)
        return torch.cat(
            (
                self._decode(query[:num_single], kv_cache, single),
                self._prefill(_rows_from(query, num_single), kv_cache, runs),
            )
        )

    def _prefill(self, query: Tensor, kv_cache: Tensor, rows: PrefillRows) -> Tensor:
        if self.library is not None and not query.is_meta:  # whose kernels are always compiled
            attended = self.library.attend(query, kv_cache, rows)
            if attended is not None:
                return attended
        return prefill_attention(
            query,
            kv_cache,
            rows.block_tables,
            rows.cu_seqlens_q,
            rows.context_lens,
            self.scale,
            lower=rows.lower,
            softcap=self.softcap,
            kv_scales=self.kv_scales,
            value_dim=self.value_dim,
            sinks=self.sinks,
            is_batch_invariant=self.is_batch_invariant,
        )

    def _decode(self, query: Tensor, kv_cache: Tensor, rows: DecodeRows) -> Tensor:
        return decode_attention(
            query,
            kv_cache,
            rows.block_tables,
            rows.context_lens,
            self.scale,
            lower=rows.lower,
            softcap=self.softcap,
            kv_scales=self.kv_scales,
            value_dim=self.value_dim,
            sinks=self.sinks,
            is_batch_invariant=self.is_batch_invariant,
        )


class Attention(PagedAttention):
    """Grouped-query attention. Heads may have norms."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype: torch.dtype) -> None:
        super().__init__(config)
        self.head_dim = config.head_dim
        self.norm_eps = config.rms_norm_eps
        self.has_unit_offset_norms = config.has_unit_offset_norms
        num_qkv_heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv_proj = Linear(
            config.hidden_size,
            num_qkv_heads * config.head_dim,
            has_bias=config.has_qkv_bias,
            dtype=dtype,
        )
        self.o_proj = Linear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            has_bias=config.has_output_bias,
            dtype=dtype,
            lane_borders=head_lanes(config.num_heads, config.head_dim),
        )
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.parts = {} if config.has_fused_projections else {"qkv_proj": parts}
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.has_qk_norm or layer.has_weightless_qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(config.head_dim, config, dtype=dtype, has_weight=config.has_qk_norm)
                for _ in range(2)
            )

    def destinations(self) -> dict[str, Tensor]:
        found = child_destinations(self, self.parts)
        return found if self.sinks is None else {**found, "sinks": self.sinks}

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, inputs: AttentionInputs
    ) -> Tensor:
        """x [T, hidden]; kv_cache of this layer [2, num_blocks, num_kv_heads, block_size, D]."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        query = rotate_and_store(
            heads,
            cos,
            sin,
            kv_cache,
            inputs.slot_mapping,
            query_norm=None if self.q_norm is None else self.q_norm.weight,
            key_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=self.norm_eps,
            has_unit_offset=self.has_unit_offset_norms,
            kv_scales=self.kv_scales,
        )
        return self.o_proj(self.attend(query, kv_cache, inputs).flatten(1))


def _rows_from(query: Tensor, first: int) -> Tensor:
    """Returns the rows from `first` on, at an aligned address: see `_by_group`."""
    rows = query[first:]
    return rows.clone() if rows.stride(0) * rows.itemsize % ALIGNMENT else rows
