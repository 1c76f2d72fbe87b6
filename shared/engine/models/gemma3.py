"""Gemma 3, text: like Gemma 2 with QK norms instead of score caps, and two ropes.

One layer in `sliding_window_pattern` has full attention, with a rotary base of 1,000,000 and
optional scaling; the others have a window, with a base of 10,000. transformers 4 writes the two
bases as `rope_theta` and `rope_local_base_freq`, and the scaling of the former as `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shared.engine.model_config.checkpoint_form import TEXT_PART
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.config_fields import (
    FULL,
    SLIDING,
    ConfigFields,
    config_fields,
    rope_of,
    text_fields,
)
from shared.engine.models.gemma2 import gemma_decoder
from shared.errors import CheckpointError

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def configure(given: Mapping[str, Any]) -> ModelConfig:
    fields = config_fields(
        given,
        vocab_size=262_208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131_072,
        sliding_window=4096,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )
    fields = replace(fields, rope_parameters=_ropes(fields), rope_scaling=None)
    config = gemma_decoder(fields, local_layers=fields.sliding_window_pattern)
    return replace(config, has_qk_norm=True)


def configure_text_part(given: Mapping[str, Any]) -> ModelConfig:
    """Returns the text part of a multimodal model, which is served for text only."""
    return replace(configure(text_fields(given)), checkpoint=TEXT_PART)


def _ropes(fields: ConfigFields) -> dict[str, Any]:
    written = fields.rope_parameters or {}
    for unknown in written.keys() - {FULL, SLIDING}:
        raise CheckpointError(f"rope_parameters: {unknown!r} is not a layer type")
    theta = GLOBAL_THETA if fields.rope_theta is None else fields.rope_theta
    local_theta = LOCAL_THETA
    if fields.rope_local_base_freq is not None:
        local_theta = fields.rope_local_base_freq
    return {
        FULL: {
            "rope_theta": theta,
            **rope_of(written, FULL),
            **(fields.rope_scaling or {}),
        },
        SLIDING: {"rope_theta": local_theta, **rope_of(written, SLIDING)},
    }
