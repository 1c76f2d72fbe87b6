"""Gemma 2: norms before and after attention and MLP, a window on every other layer, soft caps.

Norm weights are offsets from one, embeddings are scaled by the square root of their width, the gate
is a GELU, and attention scores are scaled by `query_pre_attn_scalar`, not by the head's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.config_fields import ConfigFields, config_fields, decoder_config


def configure(given: Mapping[str, Any]) -> ModelConfig:
    fields = config_fields(
        given,
        head_dim=256,
        max_position_embeddings=8192,
        sliding_window=4096,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    return replace(
        gemma_decoder(fields, local_layers=2), attention_softcap=fields.attn_logit_softcapping
    )


def gemma_decoder(fields: ConfigFields, *, local_layers: int) -> ModelConfig:
    """Returns the features of all Gemmas from 2 on; every `local_layers`-th layer has no window."""
    config = decoder_config(
        fields,
        is_sliding=lambda layer_index: (layer_index + 1) % local_layers != 0,
        may_list_layers=True,
    )
    return replace(
        config,
        attention_scale=fields.query_pre_attn_scalar**-0.5,
        embedding_scale=fields.hidden_size**0.5,
        logit_softcap=fields.final_logit_softcapping,
        has_qkv_bias=fields.attention_bias,
        has_output_bias=fields.attention_bias,
        has_post_norms=True,
        has_unit_offset_norms=True,
    )
