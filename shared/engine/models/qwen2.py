"""Qwen2 and Qwen2.5: like Llama, with biases on query, key and value, and an optional window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.config_fields import ConfigFields, config_fields, decoder_config

MAX_POSITIONS = 32_768


def configure(given: Mapping[str, Any]) -> ModelConfig:
    fields = config_fields(given, max_position_embeddings=MAX_POSITIONS, sliding_window=4096)
    return replace(windowed_decoder(fields), has_qkv_bias=True)


def windowed_decoder(fields: ConfigFields) -> ModelConfig:
    """Reads a config whose `sliding_window` needs `use_sliding_window`, and applies from layer
    `max_window_layers` on.
    """
    if not fields.use_sliding_window:
        fields = replace(fields, sliding_window=None)
    return decoder_config(
        fields,
        is_sliding=lambda layer_index: (
            fields.sliding_window is not None and layer_index >= fields.max_window_layers
        ),
        may_list_layers=True,
    )
