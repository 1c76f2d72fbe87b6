"""gpt-oss: experts with biases in every layer, sinks, and a window in every other layer.

The gate of experts is clamped, and its other factor is up + 1. A norm is rounded after the product
with its weight. The checkpoint has the experts of a layer in one tensor, in BF16 as factors on the
right of x, in MXFP4 as rows; rows of gate and up alternate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from shared.engine.model_config.checkpoint_form import CheckpointForm, StackedExperts
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.moe_config import ClampedGate, MoeConfig, Routing
from shared.engine.models.config_fields import PositiveFloat, Width, config_fields, decoder_config
from shared.engine.models.moe.fields import NumExperts, moe_fields, with_experts

DEFAULTS: dict[str, Any] = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "attention_bias": True,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


class _GptOssFields(msgspec.Struct, frozen=True, kw_only=True):
    intermediate_size: Width = 2880
    num_local_experts: NumExperts = 128
    num_experts_per_tok: NumExperts = 4
    swiglu_limit: PositiveFloat = 7.0
    swiglu_alpha: PositiveFloat = 1.702


def configure(given: Mapping[str, Any]) -> ModelConfig:
    known = {name: value for name, value in given.items() if value is not None}
    own: _GptOssFields = moe_fields(known, _GptOssFields)
    defaults = dict(DEFAULTS)
    if known.get("rope_parameters"):
        del defaults["rope_scaling"]
    fields = config_fields(known, intermediate_size=own.intermediate_size, **defaults)
    config = decoder_config(fields, is_sliding=lambda layer: layer % 2 == 0, may_list_layers=True)
    moe = MoeConfig(
        num_experts=own.num_local_experts,
        experts_per_token=own.num_experts_per_tok,
        intermediate_size=own.intermediate_size,
        routing=Routing(score="softmax", is_renormalised=True, has_bias=True),
        clamped_gate=ClampedGate(limit=own.swiglu_limit, alpha=own.swiglu_alpha),
    )
    config = replace(
        config,
        has_qkv_bias=fields.attention_bias,
        has_output_bias=fields.attention_bias,
        has_sinks=True,
        has_norms_rounded_once=True,
        checkpoint=_form(own),
    )
    return with_experts(config, moe, lambda _: True)


def _form(own: _GptOssFields) -> CheckpointForm:
    experts = StackedExperts(
        num_experts=own.num_local_experts, inner=own.intermediate_size, is_interleaved=True
    )
    return CheckpointForm(renames=((r"\.mlp\.router\.", ".mlp.gate."),), experts=experts)
