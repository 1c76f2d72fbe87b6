"""Llama 4 (Scout, Maverick), text: three layers with rope in chunks of tokens, then one without.

Each token has one expert, whose input it scales by the sigmoid of its logit, and a shared one.

A layer with rope sees the tokens of its chunk, and may normalise queries and keys without weights.
A layer without rope sees all tokens, and its queries grow with the position. transformers
normalises after the rotation, which does not change the norm of a head: it is the same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from shared.engine.model_config.checkpoint_form import (
    TEXT_PART,
    CheckpointForm,
    PairedRows,
    StackedExperts,
)
from shared.engine.model_config.model_config import LayerConfig, ModelConfig, QueryTemperature
from shared.engine.model_config.moe_config import MoeConfig, Routing
from shared.engine.models.config_fields import (
    FULL,
    NumLayers,
    Positive,
    PositiveFloat,
    Width,
    config_fields,
    decoder_config,
    text_fields,
)
from shared.engine.models.moe.fields import NumExperts, moe_fields, with_experts
from shared.errors import CheckpointError
from shared.kv_layout import Chunk, Reach

CHUNKED = "chunked_attention"
DEFAULTS: dict[str, Any] = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
Flag = Annotated[int, msgspec.Meta(ge=0, le=1)]


class _Llama4Fields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of Llama 4. `no_rope_layers` has 0 for a layer without rope; if it is empty,
    `no_rope_layer_interval` decides. `intermediate_size` is that of experts.
    """

    intermediate_size: Width = 8192
    intermediate_size_mlp: Width = 16_384
    use_qk_norm: bool = True
    no_rope_layers: tuple[Flag, ...] | None = None
    no_rope_layer_interval: Positive = 4
    attention_chunk_size: Positive | None = 8192
    layer_types: tuple[str, ...] | None = None
    attn_temperature_tuning: bool | int = True
    floor_scale: PositiveFloat = 8192
    attn_scale: float = 0.1
    num_local_experts: NumExperts = 16
    num_experts_per_tok: NumExperts = 1
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: NumLayers = 1


def configure(given: Mapping[str, Any]) -> ModelConfig:
    own: _Llama4Fields = moe_fields(given, _Llama4Fields)
    shared = {name: value for name, value in given.items() if name != "layer_types"}
    shared["intermediate_size"] = own.intermediate_size_mlp
    fields = config_fields(shared, **DEFAULTS)
    config = decoder_config(fields)
    config = replace(
        config,
        layers=tuple(_layer(own, has_rope) for has_rope in _ropes(own, config.num_layers)),
        has_qkv_bias=fields.attention_bias,
        has_output_bias=fields.attention_bias,
        checkpoint=_form(config.head_dim, own),
    )
    moe_layers = _moe_layers(own, config.num_layers)
    return with_experts(config, _experts(own), lambda index: index in moe_layers)


def configure_text_part(given: Mapping[str, Any]) -> ModelConfig:
    """Returns the text part of a multimodal model, which is served for text only."""
    return configure(text_fields(given))


def _layer(own: _Llama4Fields, has_rope: bool) -> LayerConfig:
    if has_rope:
        return LayerConfig(reach=_chunk(own), has_weightless_qk_norm=own.use_qk_norm)
    temperature = QueryTemperature(floor_scale=own.floor_scale, scale=own.attn_scale)
    has_temperature = bool(own.attn_temperature_tuning)  # older configs write 4 or 0
    return LayerConfig(rope_index=None, query_temperature=temperature if has_temperature else None)


def _chunk(own: _Llama4Fields) -> Reach:
    if own.attention_chunk_size is None:
        raise CheckpointError(
            "attention_chunk_size is missing, but layers with rope have chunked attention"
        )
    return Chunk(own.attention_chunk_size)


def _ropes(own: _Llama4Fields, num_layers: int) -> list[bool]:
    """Whether each layer has rope. Raises CheckpointError."""
    has_rope = [(layer + 1) % own.no_rope_layer_interval != 0 for layer in range(num_layers)]
    if own.no_rope_layers:
        has_rope = [flag == 1 for flag in own.no_rope_layers]
    implied = [CHUNKED if each else FULL for each in has_rope]
    given = implied if own.layer_types is None else own.layer_types
    for name, values in (("no_rope_layers", implied), ("layer_types", given)):
        if len(values) != num_layers:
            raise CheckpointError(f"{len(values)} {name} for {num_layers} layers")
    for layer, (written, expected) in enumerate(zip(given, implied, strict=True)):
        if written != expected:
            raise CheckpointError(
                f"layer_types[{layer}] is {written!r}, but a layer "
                f"{'with' if has_rope[layer] else 'without'} rope (no_rope_layers) is {expected!r}"
            )
    return has_rope


def _experts(own: _Llama4Fields) -> MoeConfig:
    """Returns the experts' config. The outputs of several experts of a token are added, as
    transformers does too.
    """
    return MoeConfig(
        num_experts=own.num_local_experts,
        experts_per_token=own.num_experts_per_tok,
        intermediate_size=own.intermediate_size,
        shared_intermediate_size=own.intermediate_size,
        routing=Routing(score="sigmoid", scales_input=True),
    )


def _moe_layers(own: _Llama4Fields, num_layers: int) -> frozenset[int]:
    """Raises CheckpointError."""
    step = own.interleave_moe_layer_step
    if own.moe_layers is None:
        return frozenset(range(step - 1, num_layers, step))
    for layer in own.moe_layers:
        if not 0 <= layer < num_layers:
            raise CheckpointError(f"moe_layers: there is no layer {layer} of {num_layers} layers")
    return frozenset(own.moe_layers)


def _form(head_dim: int, own: _Llama4Fields) -> CheckpointForm:
    """Returns the form of the checkpoint. Rotary pairs are neighbours in the checkpoint, and
    experts of a layer are one tensor.
    """
    rows = PairedRows(head=head_dim, first=0, dim=head_dim)
    return CheckpointForm(
        renames=(
            *TEXT_PART.renames,
            (r"\.feed_forward\.router\.", ".mlp.gate."),
            (r"\.feed_forward\.shared_expert\.", ".mlp.shared_experts."),
            (r"\.feed_forward\.", ".mlp."),
        ),
        dropped=(r"(model\.)?(vision_model|multi_modal_projector)\.",),
        experts=StackedExperts(num_experts=own.num_local_experts, inner=own.intermediate_size),
        paired=((r"model\.layers\.\d+\.self_attn\.[qk]_proj\.(weight|bias)", rows),),
    )
