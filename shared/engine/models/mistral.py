"""Mistral: like Llama, with a sliding window over all layers or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.config_fields import config_fields, decoder_config


def configure(given: Mapping[str, Any]) -> ModelConfig:
    fields = config_fields(
        given, num_key_value_heads=8, sliding_window=4096, max_position_embeddings=4096 * 32
    )
    return decoder_config(fields, is_sliding=lambda _: fields.sliding_window is not None)
