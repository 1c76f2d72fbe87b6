"""Bytes that a rank holds, from the config alone. No torch."""

from __future__ import annotations

from shared.engine.model_config.model_config import LayerConfig, ModelConfig
from shared.engine.model_config.moe_config import MoeConfig
from shared.engine.parallel.cuts import whole_blocks
from shared.engine.parallel.rank_part import RankPart, local_config
from shared.engine.planning.quantized_bytes import saved_bytes

FP32_BYTES = 4  # of a weight of a router, and of a sink


def num_weights(config: ModelConfig, part: RankPart) -> int:
    """Returns the weights of the rank's part, with what every rank of its stage holds alike: norms,
    and the biases of row-parallel GEMMs.
    """
    local = local_config(config, part)
    count = sum(_layer_weights(local, layer) for layer in local.layers)
    vocabulary = local.vocab_size * local.hidden_size
    if part.has_embedding:
        count += vocabulary
    if part.has_head:
        count += local.hidden_size  # the final norm
        is_shared = config.has_tied_embeddings and part.has_embedding
        count += 0 if is_shared else vocabulary
    return count


def weight_bytes(config: ModelConfig, part: RankPart, item_bytes: int) -> int:
    """Returns the bytes of those weights. `item_bytes` is the size of one that is not quantized."""
    num_sinks = len(part.layers) * len(part.heads) * config.has_sinks
    wide = (num_router_weights(config, part) + num_sinks) * (FP32_BYTES - item_bytes)
    saved = saved_bytes(config, part, item_bytes)
    return num_weights(config, part) * item_bytes + wide - saved


def kv_values_per_token(config: ModelConfig, part: RankPart) -> int:
    """Keys and values, or latents, of one token in all layers of the part."""
    if config.latent is not None:
        return len(part.layers) * (config.latent.kv_rank + config.latent.rope_dim)
    return len(part.layers) * 2 * len(part.kv_heads) * config.head_dim


def num_router_weights(config: ModelConfig, part: RankPart) -> int:
    """Counts those of `num_weights` that are FP32 whatever the model's dtype."""
    layers = local_config(config, part).layers
    return sum(_router_weights(config, layer.moe) for layer in layers if layer.moe is not None)


def _layer_weights(local: ModelConfig, layer: LayerConfig) -> int:
    hidden = local.hidden_size
    count = attention_weights(local) + _attention_biases(local) + hidden * local.has_output_bias
    count += _attention_norms(local) + hidden * (4 if local.has_post_norms else 2)
    if layer.moe is None:
        return count + _mlp_weights(local, local.intermediate_size)
    moe = layer.moe
    experts, columns, shared = (
        end - first for first, end in (moe.held.experts, moe.held.columns, moe.held.shared)
    )
    expert = 3 * whole_blocks(columns) * whole_blocks(hidden)
    if moe.clamped_gate is not None:  # its projections have biases
        expert += 2 * whole_blocks(columns) + whole_blocks(hidden)
    return count + experts * expert + _router_weights(local, moe) + _mlp_weights(local, shared)


def attention_weights(local: ModelConfig) -> int:
    """Counts the weights of the matrices of one layer's attention."""
    hidden, query = local.hidden_size, local.num_heads * local.head_dim
    output, latent = local.num_heads * local.output_dim * hidden, local.latent
    if latent is None:
        return (query + 2 * local.num_kv_heads * local.head_dim) * hidden + output
    queries = query * hidden if latent.query_rank is None else latent.query_rank * (hidden + query)
    expansion = local.num_heads * (latent.nope_dim + latent.value_dim) * latent.kv_rank
    return queries + (latent.kv_rank + latent.rope_dim) * hidden + expansion + output


def _attention_biases(local: ModelConfig) -> int:
    """Counts the biases of attention, but for that of the output, and its sinks."""
    sinks = local.num_heads * local.has_sinks
    if not local.has_qkv_bias:
        return sinks
    if local.latent is None:
        return sinks + (local.num_heads + 2 * local.num_kv_heads) * local.head_dim
    return local.latent.kv_rank + local.latent.rope_dim + (local.latent.query_rank or 0)


def _attention_norms(local: ModelConfig) -> int:
    if local.latent is None:
        return 2 * local.head_dim * local.has_qk_norm
    return local.latent.kv_rank + (local.latent.query_rank or 0)


def _mlp_weights(local: ModelConfig, columns: int) -> int:
    biases = (2 * columns + local.hidden_size) * local.has_mlp_bias if columns else 0
    return 3 * columns * local.hidden_size + biases


def _router_weights(local: ModelConfig, moe: MoeConfig) -> int:
    bias = moe.num_experts * (moe.routing.has_choice_bias + moe.routing.has_bias)
    return whole_blocks(moe.num_experts) * whole_blocks(local.hidden_size) + bias
