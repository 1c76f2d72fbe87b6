"""Mixtral: Mistral with experts in every layer, whose weights are renormalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from shared.engine.model_config.checkpoint_form import CheckpointForm
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.moe_config import MoeConfig, Routing
from shared.engine.models import mistral
from shared.engine.models.config_fields import with_defaults
from shared.engine.models.moe.fields import NumExperts, moe_fields, with_experts

DEFAULTS = {"sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
FORM = CheckpointForm(
    renames=(
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.mlp\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.mlp\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"(\.mlp\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    )
)


class _MixtralFields(msgspec.Struct, frozen=True, kw_only=True):
    num_local_experts: NumExperts = 8
    num_experts_per_tok: NumExperts = 2


def configure(given: Mapping[str, Any]) -> ModelConfig:
    fields: _MixtralFields = moe_fields(given, _MixtralFields)
    config = mistral.configure(with_defaults(given, DEFAULTS))
    moe = MoeConfig(
        num_experts=fields.num_local_experts,
        experts_per_token=fields.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        routing=Routing(score="softmax", is_renormalised=True),
    )
    return replace(with_experts(config, moe, lambda _: True), checkpoint=FORM)
