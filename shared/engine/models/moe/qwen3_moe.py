"""Qwen3-MoE: Qwen3 with experts in some layers. Its window, if used, is that of all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.moe_config import MoeConfig, Routing
from shared.engine.models import qwen3
from shared.engine.models.config_fields import NumLayers, Width
from shared.engine.models.moe.fields import Count, NumExperts, moe_fields, with_experts

EVERY_LAYER = {"max_window_layers": 0, "layer_types": None}  # transformers reads neither


class _Qwen3Fields(msgspec.Struct, frozen=True, kw_only=True):
    num_experts: NumExperts | None = None
    num_local_experts: NumExperts = 128
    num_experts_per_tok: NumExperts = 8
    moe_intermediate_size: Width = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: NumLayers = 1
    mlp_only_layers: tuple[Count, ...] | None = None


def configure(given: Mapping[str, Any]) -> ModelConfig:
    fields: _Qwen3Fields = moe_fields(given, _Qwen3Fields)
    moe = MoeConfig(
        num_experts=fields.num_experts or fields.num_local_experts,
        experts_per_token=fields.num_experts_per_tok,
        intermediate_size=fields.moe_intermediate_size,
        routing=Routing(score="softmax", is_renormalised=fields.norm_topk_prob),
    )
    dense = fields.mlp_only_layers or ()
    return with_experts(
        qwen3.configure({"head_dim": None, **given, **EVERY_LAYER}),
        moe,
        lambda layer: layer not in dense and (layer + 1) % fields.decoder_sparse_step == 0,
    )
