"""What Llama-3.1-8B must read and compute, and the time for that at a device's ceilings."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {  # the relevant part of its config.json
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 128_001,
}
WEIGHT_BYTES = 2  # BF16
# For a decode step, estimated before any run on a GPU, without graphs: low and high.
EXPECTED_DECODE_MS = {1: (13.0, 17.0), 64: (15.0, 19.0)}
EXPECTED_PREFILL_S = {512: (0.36, 0.45)}  # for 8,192 tokens, by chunk


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
    """The weights of all layers, without the head."""
    return config["num_hidden_layers"] * sum(n * k for n, k in layer_shapes(config))


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    planes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    return int(planes * config["head_dim"] * WEIGHT_BYTES)


def decode_bytes(config: dict[str, Any], batch: int, context: int) -> int:
    """The bytes that a step must read: weights and head once, the KV of each sequence."""
    head = config["vocab_size"] * config["hidden_size"]
    weights = (num_layer_weights(config) + head) * WEIGHT_BYTES
    return weights + batch * context * kv_bytes_per_token(config)


def prefill_flops(config: dict[str, Any], num_tokens: int) -> float:
    """The operations of the layers' products, and of causal attention: 4 operations per pair of
    tokens, half of the pairs.
    """
    width = config["num_attention_heads"] * config["head_dim"]
    attention = 2 * width * num_tokens**2 * config["num_hidden_layers"]
    return 2.0 * num_layer_weights(config) * num_tokens + attention


def beside_prediction(predicted_s: float, measured_s: float) -> dict[str, float]:
    """Columns of a row. `error`: (measured - predicted) / predicted."""
    return {
        "predicted_ms": round(predicted_s * 1e3, 4),
        "measured_ms": round(measured_s * 1e3, 4),
        "error": round(measured_s / predicted_s - 1, 3),
        "of_roofline": round(predicted_s / measured_s, 3),
    }
