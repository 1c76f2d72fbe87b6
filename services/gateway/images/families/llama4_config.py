"""How Llama 4 takes images, from a checkpoint's files."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from services.gateway.images.families.config_files import (
    FoundFile,
    Steps,
    check_resample,
    check_steps,
    decoded,
    digest_of,
)
from services.gateway.images.families.tile_config import (
    MAX_TILE_SIZE,
    MAX_TILES_ASIDE,
    TileConfig,
)
from shared.errors import ConfigError

MODEL_TYPES = ("llama4",)
BILINEAR = 2  # of Pillow's filters

Size = Annotated[int, Meta(ge=1, le=MAX_TILE_SIZE)]


class Llama4Config(TileConfig, frozen=True, tag=True):
    """An image is put on the canvas of at most `max_tiles` tiles that fits it best. Unless it
    `fills_canvas`, it is not enlarged beyond one tile.
    """

    max_tiles: int
    fills_canvas: bool = False


class _Square(msgspec.Struct, frozen=True):
    height: Size = 336
    width: Size = 336


class _Llama4Vision(msgspec.Struct, frozen=True):
    """With the defaults of transformers, as `_Llama4Model` and `_Llama4Processor`."""

    image_size: Size = 448
    patch_size: Size = 14
    pixel_shuffle_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.5


class _Llama4Model(msgspec.Struct, frozen=True):
    image_token_index: Annotated[int, Meta(ge=0)] = 200_092
    vision_config: _Llama4Vision | None = None


class _Llama4Processor(Steps, frozen=True, kw_only=True):
    size: _Square = _Square()
    resample: int = BILINEAR
    max_patches: Annotated[int, Meta(ge=1, le=MAX_TILES_ASIDE)] = 16
    resize_to_max_canvas: bool = False


def read(model_file: FoundFile, processor_file: FoundFile) -> Llama4Config | None:
    """Returns None for a checkpoint of the text part. Raises ConfigError."""
    model = decoded(model_file, _Llama4Model)
    path, vision = processor_file.path, model.vision_config
    if vision is None:
        return None
    processor = decoded(processor_file, _Llama4Processor)
    check_steps(processor, path)
    check_resample(processor.resample, BILINEAR, "bilinear", path)
    size = processor.size
    if not size.height == size.width == vision.image_size:
        raise ConfigError(
            f"{path}: size {size.height} x {size.width} is not vision_config.image_size, "
            f"{vision.image_size}"
        )
    tokens = (vision.image_size // vision.patch_size * vision.pixel_shuffle_ratio) ** 2
    sizes = (vision.image_size, vision.patch_size, vision.pixel_shuffle_ratio)
    return Llama4Config(
        tile_size=vision.image_size,
        tokens_per_tile=round(tokens),
        image_token_id=model.image_token_index,
        digest=digest_of(processor_file.data, sizes),
        max_tiles=processor.max_patches,
        fills_canvas=processor.resize_to_max_canvas,
    )
