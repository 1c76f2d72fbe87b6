"""The bytes and operations of a dense model, and the least time for them on a session's card."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_kit.session import Session

WEIGHT_BYTES = 2  # BF16


def decode_s(session: Session, config: dict[str, Any], batch: int, context: int) -> float:
    """Returns the least seconds of a decode step, bound by reading; NaN on an unknown card."""
    return decode_bytes(config, batch, context) / session.ceiling("copy_bytes_s")


def prefill_s(session: Session, config: dict[str, Any], num_tokens: int) -> float:
    """Returns the least seconds of a prefill, bound by computing; NaN on an unknown card."""
    return prefill_flops(config, num_tokens) / session.ceiling("matmul_flops")


def mixed_s(
    session: Session, config: dict[str, Any], batch: int, context: int, num_tokens: int
) -> float:
    """Returns the least seconds of a decode step beside tokens of a prompt, bound by the products
    of all tokens and by reading the KV of each sequence.
    """
    products = 2.0 * num_layer_weights(config) * (batch + num_tokens)
    kv = (batch + 1) * context * kv_bytes_per_token(config)
    return products / session.ceiling("matmul_flops") + kv / session.ceiling("copy_bytes_s")


def layer_shapes(config: dict[str, Any]) -> list[tuple[int, int]]:
    """[N, K] of a layer's products: fused q, k and v; o; fused gate and up; down."""
    hidden, inner, head_dim = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return [
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * inner, hidden),
        (hidden, inner),
    ]


def num_layer_weights(config: dict[str, Any]) -> int:
    """Returns the weights of all layers, without the head."""
    return config["num_hidden_layers"] * sum(n * k for n, k in layer_shapes(config))


def weight_bytes(config: dict[str, Any]) -> int:
    """Returns the bytes of all weights: layers, embedding and head."""
    ends = 2 * config["vocab_size"] * config["hidden_size"]
    return int(num_layer_weights(config) + ends) * WEIGHT_BYTES


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    planes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    return int(planes * config["head_dim"] * WEIGHT_BYTES)


def decode_bytes(config: dict[str, Any], batch: int, context: int) -> int:
    """Returns the bytes that a step must read: weights and head once, the KV of each sequence."""
    head = config["vocab_size"] * config["hidden_size"]
    weights = (num_layer_weights(config) + head) * WEIGHT_BYTES
    return weights + batch * context * kv_bytes_per_token(config)


def prefill_flops(config: dict[str, Any], num_tokens: int) -> float:
    """Returns the operations of the layers' products, and of causal attention: 4 operations per
    pair of tokens, half of the pairs.
    """
    width = config["num_attention_heads"] * config["head_dim"]
    attention = 2 * width * num_tokens**2 * config["num_hidden_layers"]
    return 2.0 * num_layer_weights(config) * num_tokens + attention
