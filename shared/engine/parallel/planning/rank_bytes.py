"""Bytes that a rank holds, from the config alone. No torch."""

from __future__ import annotations

from shared.engine.model_config import ModelConfig
from shared.engine.parallel.planning.rank_part import RankPart, local_config


def num_weights(config: ModelConfig, part: RankPart) -> int:
    """Weights of the rank's part, with what every rank of its stage holds alike: norms, and the
    biases of row-parallel products.
    """
    local = local_config(config, part)
    count = local.num_layers * _layer_weights(local)
    vocabulary = local.vocab_size * local.hidden_size
    if part.has_embedding:
        count += vocabulary
    if part.has_head:
        count += local.hidden_size  # the final norm
        is_shared = config.has_tied_embeddings and part.has_embedding
        count += 0 if is_shared else vocabulary
    return count


def kv_values_per_token(config: ModelConfig, part: RankPart) -> int:
    """Keys and values of one token in all layers of the part."""
    return len(part.layers) * 2 * len(part.kv_heads) * config.head_dim


def _layer_weights(local: ModelConfig) -> int:
    hidden, columns = local.hidden_size, local.intermediate_size
    query, key = local.num_heads * local.head_dim, local.num_kv_heads * local.head_dim
    count = (query + 2 * key) * hidden + query * hidden + 3 * columns * hidden
    count += (query + 2 * key) * local.has_qkv_bias + hidden * local.has_output_bias
    count += (2 * columns + hidden) * local.has_mlp_bias
    count += 2 * local.head_dim * local.has_qk_norm
    return count + hidden * (4 if local.has_post_norms else 2)
