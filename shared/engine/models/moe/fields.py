"""The fields of `config.json` that describe experts, for each way of naming them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from shared.engine.model_config.checkpoint_form import CheckpointForm
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.moe_config import MoeConfig, Routing
from shared.engine.models.config_fields import NumLayers, Width
from shared.errors import CheckpointError

NumExperts = Annotated[int, msgspec.Meta(gt=0, le=2**16)]
Count = Annotated[int, msgspec.Meta(ge=0, le=4096)]
SCORES = ("sigmoid",)
CHOICES = ("noaux_tc",)


class DeepseekFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields as DeepSeek-V3, Kimi K2 and GLM-4-MoE name them."""

    num_experts_per_tok: NumExperts
    moe_intermediate_size: Width
    n_routed_experts: NumExperts | None = None
    num_local_experts: NumExperts | None = None
    n_shared_experts: Count | None = None
    n_group: NumExperts = 1
    topk_group: NumExperts = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    first_k_dense_replace: Count = 0
    moe_layer_freq: NumLayers = 1
    num_nextn_predict_layers: Count | None = None


def moe_fields(given: Mapping[str, Any], kind: type[Any], **defaults: Any) -> Any:
    """Returns the struct `kind` of the config. Raises CheckpointError."""
    try:
        return msgspec.convert({**defaults, **given}, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(str(error)) from None


def with_deepseek_experts(
    config: ModelConfig, given: Mapping[str, Any], **defaults: Any
) -> ModelConfig:
    """Returns the model with experts in all but its first layers, without multi-token prediction:
    its layers follow the model's in the checkpoint. Raises CheckpointError.
    """
    fields: DeepseekFields = moe_fields(given, DeepseekFields, **defaults)
    for name, value, known in (
        ("scoring_func", fields.scoring_func, SCORES),
        ("topk_method", fields.topk_method, CHOICES),
        ("moe_layer_freq", fields.moe_layer_freq, (1,)),
    ):
        if value not in known:
            raise CheckpointError(
                f"{name} {value!r} is not supported, only {', '.join(map(str, known))}"
            )
    num_experts = fields.n_routed_experts or fields.num_local_experts
    if num_experts is None:
        raise CheckpointError("n_routed_experts is missing")
    moe = MoeConfig(
        num_experts=num_experts,
        experts_per_token=fields.num_experts_per_tok,
        intermediate_size=fields.moe_intermediate_size,
        shared_intermediate_size=(fields.n_shared_experts or 0) * fields.moe_intermediate_size,
        routing=Routing(
            score="sigmoid",
            is_renormalised=fields.norm_topk_prob,
            has_choice_bias=True,
            num_groups=fields.n_group,
            top_groups=fields.topk_group,
            scale=fields.routed_scaling_factor,
        ),
    )
    first = fields.first_k_dense_replace
    config = with_experts(config, moe, lambda layer: layer >= first)
    return without_prediction_layers(config, fields.num_nextn_predict_layers or 0)


def with_experts(
    config: ModelConfig, moe: MoeConfig, has_experts: Callable[[int], bool]
) -> ModelConfig:
    """Returns the model with experts in the layers that `has_experts`. Raises CheckpointError."""
    _check(moe)
    layers = [
        replace(layer, moe=moe) if has_experts(index) else layer
        for index, layer in enumerate(config.layers)
    ]
    return replace(config, layers=tuple(layers))


def without_prediction_layers(config: ModelConfig, count: int) -> ModelConfig:
    """Returns the model whose checkpoint has `count` more layers, which predict later tokens."""
    if not count:
        return config
    first = config.num_layers
    indices = "|".join(str(index) for index in range(first, first + count))
    form: CheckpointForm = config.checkpoint
    dropped = (*form.dropped, rf"model\.layers\.({indices})\.")
    return replace(config, checkpoint=replace(form, dropped=dropped))


def _check(moe: MoeConfig) -> None:
    routing, chosen = moe.routing, moe.experts_per_token
    if chosen > moe.num_experts:
        raise CheckpointError(f"{chosen} experts per token are more than {moe.num_experts} experts")
    if moe.num_experts % routing.num_groups:
        raise CheckpointError(
            f"{moe.num_experts} experts cannot be cut into {routing.num_groups} groups (n_group)"
        )
    if routing.top_groups > routing.num_groups:
        raise CheckpointError(
            f"topk_group {routing.top_groups} is more than n_group {routing.num_groups}"
        )
    eligible = moe.num_experts // routing.num_groups * routing.top_groups
    if chosen > eligible:
        raise CheckpointError(
            f"{chosen} experts per token are more than the {eligible} experts of "
            f"{routing.top_groups} groups (topk_group)"
        )
