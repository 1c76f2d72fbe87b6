"""Bytes that quantized weights need less than dense ones, from the config alone. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from shared.engine.model_config.formats import num_stored_bytes
from shared.engine.model_config.model_config import LayerConfig, ModelConfig
from shared.engine.parallel.cuts import whole_blocks
from shared.engine.parallel.rank_part import RankPart, local_config

Shape = tuple[str, int, int, int]  # path in the layer, output rows, columns, number of such weights


def saved_bytes(config: ModelConfig, part: RankPart, item_bytes: int) -> int:
    """Returns the bytes that a rank's part saves over weights of `item_bytes` each. The expansion
    of latents is dense in memory.
    """
    local = local_config(config, part)
    saved = 0
    for layer in local.layers:
        for path, rows, width, count in _shapes(local, layer) if layer.formats else ():
            form = None if layer.formats is None else layer.formats.of(path)
            if form is not None:
                stored = num_stored_bytes(form, rows, width)
                saved += count * (rows * width * item_bytes - stored)
    return saved


def _shapes(local: ModelConfig, layer: LayerConfig) -> Iterator[Shape]:
    yield from _attention(local)
    hidden, moe = local.hidden_size, layer.moe
    if moe is None:
        yield from _mlp("mlp", hidden, local.intermediate_size, 1)
        return
    experts, columns, shared = (
        end - first for first, end in (moe.held.experts, moe.held.columns, moe.held.shared)
    )
    yield from _mlp("mlp.experts.0", whole_blocks(hidden), whole_blocks(columns), experts)
    if shared:
        yield from _mlp("mlp.shared_experts", hidden, shared, 1)


def _mlp(path: str, hidden: int, inner: int, count: int) -> Iterator[Shape]:
    yield f"{path}.gate_proj", inner, hidden, count
    yield f"{path}.up_proj", inner, hidden, count
    yield f"{path}.down_proj", hidden, inner, count


def _attention(local: ModelConfig) -> Iterator[Shape]:
    hidden, query = local.hidden_size, local.num_heads * local.head_dim
    key, latent = local.num_kv_heads * local.head_dim, local.latent
    yield "self_attn.o_proj", hidden, local.num_heads * local.output_dim, 1
    if latent is None:
        yield "self_attn.q_proj", query, hidden, 1
        yield "self_attn.k_proj", key, hidden, 1
        yield "self_attn.v_proj", key, hidden, 1
        return
    yield "self_attn.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, hidden, 1
    if latent.query_rank is None:
        yield "self_attn.q_proj", query, hidden, 1
        return
    yield "self_attn.q_a_proj", latent.query_rank, hidden, 1
    yield "self_attn.q_b_proj", query, latent.query_rank, 1
