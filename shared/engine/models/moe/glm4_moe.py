"""GLM-4.5 and later with experts: half of each head is rotated, heads may have norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.config_fields import config_fields, decoder_config
from shared.engine.models.moe.fields import moe_fields, with_deepseek_experts


class _Glm4Fields(msgspec.Struct, frozen=True, kw_only=True):
    use_qk_norm: bool = False


def configure(given: Mapping[str, Any]) -> ModelConfig:
    given = {"partial_rotary_factor": 0.5, **given}
    fields = config_fields(
        given, num_key_value_heads=8, max_position_embeddings=131_072, rms_norm_eps=1e-5
    )
    norms: _Glm4Fields = moe_fields(given, _Glm4Fields)
    config = replace(
        decoder_config(fields, may_rotate_partly=True),
        has_qkv_bias=fields.attention_bias,
        has_qk_norm=norms.use_qk_norm,
    )
    return with_deepseek_experts(
        config,
        given,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        n_shared_experts=1,
        first_k_dense_replace=1,
    )
