"""Llama 4 with images (Scout, Maverick): its text model beside `llama4_vision`.

The fields of `vision_config` that a checkpoint omits have transformers' defaults, and so does
everything that transformers does not read: norms have an epsilon of 1e-5, and activations are the
exact GELU. A config without `vision_config` is that of the text part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.vision_config import Llama4VisionConfig
from shared.engine.models.config_fields import NumLayers, PositiveFloat, Width
from shared.engine.models.moe import llama4
from shared.engine.models.vision.vision_fields import (
    Pixels,
    TokenId,
    check_channels,
    check_encoder,
    check_image_token,
    check_squares,
    read_fields,
)
from shared.errors import CheckpointError

_EPS = 1e-5


class Llama4RopeFields(msgspec.Struct, frozen=True, kw_only=True):
    rope_theta: PositiveFloat = 10_000.0


class Llama4VisionFields(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: Width = 768
    hidden_act: str = "gelu"
    num_hidden_layers: NumLayers = 34
    num_attention_heads: Width = 16
    num_channels: int = 3
    intermediate_size: Width = 5632
    vision_output_dim: Width = 7680
    image_size: Pixels = 448
    patch_size: Pixels = 14
    pixel_shuffle_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    projector_input_dim: Width = 4096
    projector_output_dim: Width = 4096
    multi_modal_projector_bias: bool = False
    rope_theta: PositiveFloat | None = None
    rope_parameters: Llama4RopeFields | None = None


class Llama4ImageFields(msgspec.Struct, frozen=True, kw_only=True):
    vision_config: Llama4VisionFields | None = None
    image_token_index: TokenId = 200_092


def configure(given: Mapping[str, Any]) -> ModelConfig:
    config = llama4.configure_text_part(given)
    fields = read_fields(given, Llama4ImageFields)
    if fields.vision_config is None:
        return config
    vision = _vision_config(fields.vision_config, fields.image_token_index, config.hidden_size)
    check_image_token(vision.image_token_id, config, "image_token_index")
    return replace(config, vision=vision)


def _vision_config(
    fields: Llama4VisionFields, image_token_id: int, output_size: int
) -> Llama4VisionConfig:
    """Raises CheckpointError."""
    check_channels(fields.num_channels)
    check_encoder(
        fields.hidden_size,
        fields.num_attention_heads,
        fields.hidden_act,
        "gelu",
        head_multiple=4,
    )
    scale = round(1 / fields.pixel_shuffle_ratio)
    if abs(scale * fields.pixel_shuffle_ratio - 1) > 1e-6:
        raise CheckpointError(f"pixel_shuffle_ratio {fields.pixel_shuffle_ratio} is not 1 / n")
    check_squares(fields.image_size, fields.patch_size, scale)
    _check_adapter(fields, scale)
    own = None if fields.rope_parameters is None else fields.rope_parameters.rope_theta
    return Llama4VisionConfig(
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=fields.num_attention_heads,
        image_size=fields.image_size,
        patch_size=fields.patch_size,
        layer_norm_eps=_EPS,
        scale_factor=scale,
        image_token_id=image_token_id,
        output_size=output_size,
        rope_theta=own or fields.rope_theta or 10_000.0,
        adapter_size=fields.projector_input_dim,
        adapter_output_size=fields.projector_output_dim,
    )


def _check_adapter(fields: Llama4VisionFields, scale: int) -> None:
    """Raises CheckpointError for sizes of the adapter that do not follow one another."""
    sizes = {
        "intermediate_size": (fields.intermediate_size, fields.hidden_size * scale**2),
        "projector_input_dim": (fields.projector_input_dim, fields.projector_output_dim),
        "vision_output_dim": (fields.vision_output_dim, fields.projector_output_dim),
    }
    for name, (found, expected) in sizes.items():
        if found != expected:
            raise CheckpointError(f"vision {name} {found} is not supported here, only {expected}")
    if fields.multi_modal_projector_bias:
        raise CheckpointError("a multi_modal_projector with a bias is not supported")
