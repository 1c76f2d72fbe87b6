"""The names and shapes of a model's tensors, as its modules would name them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from shared.engine.model_config.model_config import LatentConfig, LayerConfig, ModelConfig
from shared.engine.model_config.moe_config import MoeConfig

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def model_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.has_tied_embeddings:
        found["lm_head.weight"] = (config.vocab_size, hidden)
    for index, layer in enumerate(config.layers):
        for name, shape in _layer(config, layer):
            found[f"model.layers.{index}.{name}"] = shape
    return found


def _layer(config: ModelConfig, layer: LayerConfig) -> Shapes:
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.has_post_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in names:
        yield f"{name}.weight", (config.hidden_size,)
    yield from _attention(config)
    if layer.moe is None:
        yield from _mlp(config, "mlp", config.intermediate_size)
    else:
        yield from _experts(config, layer.moe)


def _experts(config: ModelConfig, moe: MoeConfig) -> Shapes:
    yield "mlp.gate.weight", (moe.num_experts, config.hidden_size)
    if moe.routing.has_bias:
        yield "mlp.gate.bias", (moe.num_experts,)
    if moe.routing.has_choice_bias:
        yield "mlp.gate.e_score_correction_bias", (moe.num_experts,)
    has_biases = moe.clamped_gate is not None
    parts = list(_mlp(replace(config, has_mlp_bias=has_biases), "", moe.intermediate_size))
    for expert in range(moe.num_experts):
        yield from ((f"mlp.experts.{expert}{name}", shape) for name, shape in parts)
    if moe.shared_intermediate_size:
        yield from _mlp(config, "mlp.shared_experts", moe.shared_intermediate_size)


def _attention(config: ModelConfig) -> Shapes:
    if config.latent is not None:
        yield from _latent_attention(config, config.latent)
        return
    dim, hidden = config.head_dim, config.hidden_size
    query, key = config.num_heads * dim, config.num_kv_heads * dim
    rows = {"q_proj": query, "k_proj": key, "v_proj": key}
    if config.has_fused_projections:
        rows = {"qkv_proj": query + 2 * key}
    yield from _linears("self_attn", rows, hidden, has_bias=config.has_qkv_bias)
    output = {"o_proj": hidden}
    yield from _linears("self_attn", output, query, has_bias=config.has_output_bias)
    if config.has_sinks:
        yield "self_attn.sinks", (config.num_heads,)
    if config.has_qk_norm:
        yield from ((f"self_attn.{name}.weight", (dim,)) for name in ("q_norm", "k_norm"))


def _latent_attention(config: ModelConfig, latent: LatentConfig) -> Shapes:
    hidden, heads, path = config.hidden_size, config.num_heads, "self_attn"
    query, has_bias = heads * config.head_dim, config.has_qkv_bias
    if latent.query_rank is None:
        yield from _linears(path, {"q_proj": query}, hidden, has_bias=False)
    else:
        rank = latent.query_rank
        yield from _linears(path, {"q_a_proj": rank}, hidden, has_bias=has_bias)
        yield f"{path}.q_a_layernorm.weight", (rank,)
        yield from _linears(path, {"q_b_proj": query}, rank, has_bias=False)
    row = {"kv_a_proj_with_mqa": latent.kv_rank + latent.rope_dim}
    yield from _linears(path, row, hidden, has_bias=has_bias)
    yield f"{path}.kv_a_layernorm.weight", (latent.kv_rank,)
    expansion = {"kv_b_proj": heads * (latent.nope_dim + latent.value_dim)}
    yield from _linears(path, expansion, latent.kv_rank, has_bias=False)
    output = heads * latent.value_dim
    yield from _linears(path, {"o_proj": hidden}, output, has_bias=config.has_output_bias)


def _mlp(config: ModelConfig, path: str, inner: int) -> Shapes:
    rows = {"gate_proj": inner, "up_proj": inner}
    if config.has_fused_projections:
        rows = {"gate_up_proj": 2 * inner}
    has_bias = config.has_mlp_bias
    yield from _linears(path, rows, config.hidden_size, has_bias=has_bias)
    yield from _linears(path, {"down_proj": config.hidden_size}, inner, has_bias=has_bias)


def _linears(path: str, rows: Mapping[str, int], columns: int, *, has_bias: bool) -> Shapes:
    for name, count in rows.items():
        yield f"{path}.{name}.weight", (count, columns)
        if has_bias:
            yield f"{path}.{name}.bias", (count,)
