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
from shared.engine.model_config.vision_config import VisionConfig
from shared.engine.models import llama
from shared.engine.models.config_fields import ACTIVATIONS, NumLayers, Width, text_fields
from shared.errors import CheckpointError

_GELU = "gelu_pytorch_tanh"
_TEXT_TYPES = ("llama", "vllama3", "")


class VisionFields(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: Width = 1152
    intermediate_size: Width = 3072
    num_hidden_layers: NumLayers = 12
    num_attention_heads: Width = 16
    num_channels: int = 3
    image_size: Annotated[int, msgspec.Meta(gt=0, le=8192)] = 224
    patch_size: Annotated[int, msgspec.Meta(gt=0, le=8192)] = 32
    hidden_act: str = _GELU
    layer_norm_eps: float = 1e-6


class ImageFields(msgspec.Struct, frozen=True, kw_only=True):
    vision_config: VisionFields = VisionFields()
    scale_factor: Annotated[int, msgspec.Meta(gt=0, le=64)] = 2
    image_token_id: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 128_257


def configure(given: Mapping[str, Any]) -> ModelConfig:
    text = text_fields(given)
    if text.get("model_type", "") not in _TEXT_TYPES:
        raise CheckpointError(f"a text model of type {text['model_type']!r} is not supported here")
    config = llama.configure({"tie_word_embeddings": False, **text})
    try:
        fields = msgspec.convert(dict(given), ImageFields)
    except msgspec.ValidationError as error:
        raise CheckpointError(str(error)) from None
    vision = _vision_config(fields, config.hidden_size)
    if vision.image_token_id >= config.vocab_size:
        raise CheckpointError(
            f"image_token_id {vision.image_token_id} is outside the vocabulary of "
            f"{config.vocab_size}"
        )
    return replace(config, checkpoint=TEXT_OF_IDEFICS, vision=vision)


def _vision_config(fields: ImageFields, output_size: int) -> VisionConfig:
    """Raises CheckpointError."""
    vision, scale = fields.vision_config, fields.scale_factor
    if vision.num_channels != 3:
        raise CheckpointError(f"images of {vision.num_channels} channels are not supported, only 3")
    if ACTIVATIONS.get(vision.hidden_act) != _GELU:
        raise CheckpointError(f"vision hidden_act {vision.hidden_act!r} is not supported")
    if vision.hidden_size % vision.num_attention_heads:
        raise CheckpointError(
            f"vision hidden_size {vision.hidden_size} is not a multiple of "
            f"{vision.num_attention_heads} heads"
        )
    side = vision.image_size // vision.patch_size
    if vision.image_size % vision.patch_size or side % scale:
        raise CheckpointError(
            f"tiles of {vision.image_size} pixels are not whole squares of {scale} patches of "
            f"{vision.patch_size}"
        )
    return VisionConfig(
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
