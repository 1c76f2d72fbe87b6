"""Llama 1 to 3: RMSNorm, grouped-query attention with rotary embedding, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.config_fields import config_fields, decoder_config


def configure(given: Mapping[str, Any]) -> ModelConfig:
    fields = config_fields(given)
    return replace(
        decoder_config(fields),
        has_qkv_bias=fields.attention_bias,
        has_output_bias=fields.attention_bias,
        has_mlp_bias=fields.mlp_bias,
    )
