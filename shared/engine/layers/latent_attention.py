"""Multi-head latent attention: the cache holds one compressed row a token for all heads.

    q = [q_n | q_r]         per head, q_r rotated
    c = norm(latent), k_r   the cached row, k_r rotated, shared by the heads
    score = q_n · (W_UK c) + q_r · k_r = (q_n W_UK) · c + q_r · k_r
    out   = W_UV Σ weight · c

Always in this absorbed form (DeepSeek-V2, 2024, section 2.1.2): keys and values that are expanded
for a prompt round otherwise, so that the bits of a token would depend on where chunks end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from kernels.ops import HeadWeights, pack_heads, per_head_linear, rotate_and_store_latent
from shared.engine.layers.attention import PagedAttention
from shared.engine.layers.attention_inputs import AttentionInputs
from shared.engine.layers.destinations import child_destinations
from shared.engine.layers.linear import Linear, unset_parameter
from shared.engine.layers.norm import RMSNorm
from shared.engine.layers.quantized_store import QuantizedStore, quantized_store
from shared.engine.model_config.formats import WeightFormat
from shared.engine.model_config.model_config import LatentConfig, LayerConfig, ModelConfig
from shared.engine.parallel.cuts import head_lanes

# transformers' modeling code has this default, whatever `rms_norm_eps` of the config is.
NORM_EPS = 1e-6


class LatentAttention(PagedAttention):
    """Attention over latents. The query is `q_proj`, or a product of low rank: `q_a_proj`, norm,
    `q_b_proj`. The first of these and `kv_a_proj_with_mqa`, which have the same input, are one
    product where they may.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype: torch.dtype) -> None:
        super().__init__(config)
        assert config.latent is not None
        latent, num_heads = config.latent, config.num_heads
        hidden, query_width = config.hidden_size, config.num_heads * config.head_dim
        has_bias, query_rank = config.has_qkv_bias, latent.query_rank
        self.head_dim = config.head_dim
        self.nope_dim = latent.nope_dim
        self.value_dim = latent.kv_rank
        self.query_rank = query_rank
        first, width = ("q_proj", query_width) if query_rank is None else ("q_a_proj", query_rank)
        rows = {first: width, "kv_a_proj_with_mqa": latent.kv_rank + latent.rope_dim}
        self.parts = {"qkv_a_proj": rows} if _is_one_product(config, layer, rows) else {}
        self._rows = rows
        if self.parts:
            num_rows = sum(rows.values())
            self.qkv_a_proj = Linear(hidden, num_rows, has_bias=has_bias, dtype=dtype)
        else:
            for name, count in rows.items():
                own_bias = has_bias and name != "q_proj"
                self.add_module(name, Linear(hidden, count, has_bias=own_bias, dtype=dtype))
        if query_rank is not None:
            self.q_a_layernorm = _norm(query_rank, config, dtype)
            self.q_b_proj = Linear(query_rank, query_width, dtype=dtype)
        self.kv_a_layernorm = _norm(latent.kv_rank, config, dtype)
        self.kv_b_proj = LatentExpansion(num_heads, latent, dtype=dtype)
        self.o_proj = Linear(
            num_heads * latent.value_dim,
            hidden,
            has_bias=config.has_output_bias,
            dtype=dtype,
            lane_borders=head_lanes(num_heads, latent.value_dim),
        )

    def destinations(self) -> dict[str, Tensor]:
        return child_destinations(self, self.parts)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, inputs: AttentionInputs
    ) -> Tensor:
        """x [T, hidden]; kv_cache of this layer [1, num_blocks, 1, block_size, L + R]."""
        query, latent = self._projected(x)
        query = query.view(x.shape[0], -1, self.head_dim)
        unrotated, rotated = query.tensor_split((self.nope_dim,), dim=2)
        query = x.new_empty(*query.shape[:2], latent.shape[1])  # both parts are written into it
        rotate_and_store_latent(
            rotated,
            latent,
            cos,
            sin,
            kv_cache,
            inputs.slot_mapping,
            norm=self.kv_a_layernorm.weight,
            eps=self.kv_a_layernorm.eps,
            kv_scales=self.kv_scales,
            out=query[:, :, self.value_dim :],
        )
        self.kv_b_proj.absorb(unrotated, out=query[:, :, : self.value_dim])
        return self.o_proj(self.kv_b_proj.values(self.attend(query, kv_cache, inputs)).flatten(1))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the queries, [T, num_heads · head_dim], and the rows of latents, [T, L + R]."""
        if self.parts:
            query, latent = self.qkv_a_proj(x).split([*self._rows.values()], dim=1)
        else:
            query, latent = (self.get_submodule(name)(x) for name in self._rows)
        if self.query_rank is not None:
            query = self.q_b_proj(self.q_a_layernorm(query))
        return query, latent


class LatentExpansion(nn.Module):
    """The weight that expands a latent to the keys (W_UK) and values (W_UV) of each head.

    A checkpoint fills `weight` [num_heads · (nope + value), L], or the memory of a quantized one.
    `pack` replaces it by dense matrices of all heads for each direction, in the form that the
    device multiplies with.
    """

    is_batch_invariant = True
    store: QuantizedStore | None = None

    def __init__(self, num_heads: int, latent: LatentConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self._sizes = num_heads, latent.nope_dim, latent.value_dim
        rows = num_heads * (latent.nope_dim + latent.value_dim)
        self.weight: nn.Parameter | None = unset_parameter(rows, latent.kv_rank, dtype=dtype)
        self._packed: tuple[HeadWeights, HeadWeights] | None = None

    def destinations(self) -> dict[str, Tensor]:
        assert self.weight is not None, "packed"
        if self.store is not None:
            return self.store.parts(self.weight)[0]
        return {"weight": self.weight}

    @property
    def num_rows(self) -> int:
        """Output rows of the unset weight."""
        assert self.weight is not None, "packed"
        return self.weight.shape[0]

    def quantize(self, form: WeightFormat, rows: Sequence[int], width: int | None = None) -> None:
        """Replaces the weights by quantized ones: see `Quantizable`."""
        assert self.weight is not None, "packed"
        width = self.weight.shape[1] if width is None else width
        self.store = quantized_store(form, rows, width, self.weight.dtype)
        memory = torch.empty(self.store.num_bytes, dtype=torch.uint8, device=self.weight.device)
        self.weight = nn.Parameter(memory, requires_grad=False)

    def pack(self) -> None:
        if self.weight is not None:
            self._packed = self.matrices()
            self.weight = None

    def matrices(self) -> tuple[HeadWeights, HeadWeights]:
        """Returns W_UKᵀ [L, nope] and W_UV [value, L] of each head. They are copies until `pack`:
        steps that only compile kernels run before.
        """
        if self._packed is not None:
            return self._packed
        assert self.weight is not None
        num_heads, nope_dim, value_dim = self._sizes
        weight = self.weight.detach()
        dense = weight if self.store is None else self.store.transcoded(weight).dense()
        heads = dense.view(num_heads, nope_dim + value_dim, -1)
        return pack_heads(heads[:, :nope_dim].transpose(1, 2)), pack_heads(heads[:, nope_dim:])

    def absorb(self, query: Tensor, *, out: Tensor) -> None:
        """query [T, num_heads, nope] -> query · W_UK [T, num_heads, L]."""
        keys, _ = self.matrices()
        per_head_linear(query, keys, is_batch_invariant=self.is_batch_invariant, out=out)

    def values(self, attended: Tensor) -> Tensor:
        """attended [T, num_heads, L] -> attended · W_UVᵀ [T, num_heads, value]."""
        _, values = self.matrices()
        return per_head_linear(attended, values, is_batch_invariant=self.is_batch_invariant)


def _is_one_product(config: ModelConfig, layer: LayerConfig, names: Iterable[str]) -> bool:
    """Whether projections can be one: full queries have no bias, and formats may differ."""
    if config.has_qkv_bias and "q_proj" in names:
        return False
    formats = layer.formats
    return formats is None or len({formats.of(f"self_attn.{name}") for name in names}) == 1


def _norm(size: int, config: ModelConfig, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, config, dtype=dtype)
    norm.eps = NORM_EPS
    return norm
