"""Qwen3, dense: like Qwen2 without its biases, and an RMSNorm on each query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.config_fields import config_fields
from shared.engine.models.qwen2 import MAX_POSITIONS, windowed_decoder


def configure(given: Mapping[str, Any]) -> ModelConfig:
    fields = config_fields(
        given, head_dim=128, max_position_embeddings=MAX_POSITIONS, sliding_window=4096
    )
    return replace(
        windowed_decoder(fields),
        has_qk_norm=True,
        has_qkv_bias=fields.attention_bias,
        has_output_bias=fields.attention_bias,
    )
