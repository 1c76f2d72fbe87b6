"""SmolVLM and Idefics 3: a Llama beside a SigLIP encoder of images.

The fields of `vision_config` that a checkpoint omits have transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from shared.engine.model_config.checkpoint_form import TEXT_OF_IDEFICS
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.vision_config import SiglipConfig
from shared.engine.models import llama
from shared.engine.models.config_fields import NumLayers, Width, text_fields
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

_GELU = "gelu_pytorch_tanh"
_TEXT_TYPES = ("llama", "vllama3", "")


class VisionFields(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: Width = 1152
    intermediate_size: Width = 3072
    num_hidden_layers: NumLayers = 12
    num_attention_heads: Width = 16
    num_channels: int = 3
    image_size: Pixels = 224
    patch_size: Pixels = 32
    hidden_act: str = _GELU
    layer_norm_eps: float = 1e-6


class ImageFields(msgspec.Struct, frozen=True, kw_only=True):
    vision_config: VisionFields = VisionFields()
    scale_factor: Annotated[int, msgspec.Meta(gt=0, le=64)] = 2
    image_token_id: TokenId = 128_257


def configure(given: Mapping[str, Any]) -> ModelConfig:
    text = text_fields(given)
    if text.get("model_type", "") not in _TEXT_TYPES:
        raise CheckpointError(f"a text model of type {text['model_type']!r} is not supported here")
    config = llama.configure({"tie_word_embeddings": False, **text})
    vision = _vision_config(read_fields(given, ImageFields), config.hidden_size)
    check_image_token(vision.image_token_id, config, "image_token_id")
    return replace(config, checkpoint=TEXT_OF_IDEFICS, vision=vision)


def _vision_config(fields: ImageFields, output_size: int) -> SiglipConfig:
    """Raises CheckpointError."""
    vision, scale = fields.vision_config, fields.scale_factor
    check_channels(vision.num_channels)
    check_encoder(vision.hidden_size, vision.num_attention_heads, vision.hidden_act, _GELU)
    check_squares(vision.image_size, vision.patch_size, scale)
    return SiglipConfig(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        layer_norm_eps=vision.layer_norm_eps,
        scale_factor=scale,
        image_token_id=fields.image_token_id,
        output_size=output_size,
    )
