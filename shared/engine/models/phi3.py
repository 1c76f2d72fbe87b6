"""Phi-3 and Phi-4: like Llama; checkpoints have fused projections and old names of `longrope`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.config_fields import config_fields, decoder_config

OLDER_NAMES = ("su", "yarn")


def configure(given: Mapping[str, Any]) -> ModelConfig:
    fields = config_fields(
        given,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    written = fields.rope_scaling or fields.rope_parameters or {}
    rope_type = written.get("rope_type", written.get("type"))
    if rope_type in OLDER_NAMES:
        written = {**written, "rope_type": "longrope"}
    fields = replace(fields, rope_parameters=written, rope_scaling=None)
    config = decoder_config(
        fields,
        is_sliding=lambda _: fields.sliding_window is not None,
        may_rotate_partly=True,
    )
    return replace(config, has_fused_projections=True)
