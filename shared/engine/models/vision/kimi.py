"""Kimi K2.5: a DeepSeek V3 beside MoonViT. Images only: a video has places in time besides.

The fields of `vision_config` that a checkpoint omits are those of the published one; transformers
names some of them without `vt_` and `init_`. A config without `vision_config` is that of the text
part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.vision_config import MoonVitConfig
from shared.engine.models import deepseek
from shared.engine.models.config_fields import NumLayers, PositiveFloat, Width
from shared.engine.models.vision.vision_fields import (
    Pixels,
    TokenId,
    check_encoder,
    check_image_token,
    read_fields,
)
from shared.errors import CheckpointError

_GELU = "gelu_pytorch_tanh"
_MAX_MERGE = 8


class KimiVisionFields(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: Width = 1152
    intermediate_size: Width = 4304
    num_hidden_layers: NumLayers = 27
    num_attention_heads: Width = 16
    hidden_act: str = _GELU
    patch_size: Pixels = 14
    pos_emb_height: Width = 64
    pos_emb_width: Width = 64
    merge_kernel_size: tuple[int, int] = (2, 2)
    merge_type: str = "sd2_tpool"
    mm_projector_type: str = "patchmerger"
    projector_hidden_act: str = "gelu"
    projector_ln_eps: PositiveFloat = 1e-5


class KimiImageFields(msgspec.Struct, frozen=True, kw_only=True):
    vision_config: dict[str, Any] | None = None
    media_placeholder_token_id: TokenId | None = None
    image_token_id: TokenId = 163_605
    projection_layer_norm_eps: PositiveFloat | None = None  # transformers' place for it


def configure(given: Mapping[str, Any]) -> ModelConfig:
    config = deepseek.configure_text_part(given)
    fields = read_fields(given, KimiImageFields)
    if fields.vision_config is None:
        return config
    own = {_own_name(name): value for name, value in fields.vision_config.items()}
    vision = _vision_config(read_fields(own, KimiVisionFields), fields, config.hidden_size)
    check_image_token(vision.image_token_id, config, "media_placeholder_token_id")
    return replace(config, vision=vision)


def _own_name(name: str) -> str:
    return name.removeprefix("vt_").removeprefix("init_")


def _vision_config(
    vision: KimiVisionFields, fields: KimiImageFields, output_size: int
) -> MoonVitConfig:
    """Raises CheckpointError."""
    check_encoder(
        vision.hidden_size,
        vision.num_attention_heads,
        vision.hidden_act,
        _GELU,
        head_multiple=4,
    )
    rows, columns = vision.merge_kernel_size
    if rows != columns or not 0 < rows <= _MAX_MERGE:
        raise CheckpointError(f"merge_kernel_size {[rows, columns]} is not supported, only squares")
    for name, supported in (
        ("merge_type", "sd2_tpool"),
        ("mm_projector_type", "patchmerger"),
        ("projector_hidden_act", "gelu"),
    ):
        if getattr(vision, name) != supported:
            found = getattr(vision, name)
            raise CheckpointError(f"vision {name} {found!r} is not supported, only {supported!r}")
    token_id = fields.media_placeholder_token_id
    return MoonVitConfig(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        patch_size=vision.patch_size,
        merge_size=rows,
        position_rows=vision.pos_emb_height,
        position_columns=vision.pos_emb_width,
        projector_eps=fields.projection_layer_norm_eps or vision.projector_ln_eps,
        image_token_id=fields.image_token_id if token_id is None else token_id,
        output_size=output_size,
    )
