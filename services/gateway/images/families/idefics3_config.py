"""How Idefics3 and SmolVLM take images, from a checkpoint's files."""

from __future__ import annotations

from pathlib import Path
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

MODEL_TYPES = ("idefics3", "smolvlm")  # one processor
LANCZOS = 1  # of Pillow's filters

Size = Annotated[int, Meta(ge=1, le=MAX_TILE_SIZE * MAX_TILES_ASIDE)]


class Idefics3Config(TileConfig, frozen=True, tag=True):
    """An image is resized until its longest edge has `longest_edge` pixels, and cut into square
    tiles; unless it `is_split`, it is one tile.
    """

    longest_edge: int
    is_split: bool = True


class _Edge(msgspec.Struct, frozen=True):
    longest_edge: Size


class _Idefics3Vision(msgspec.Struct, frozen=True):
    """With the defaults of transformers, as `_Idefics3Model`."""

    image_size: Size = 224
    patch_size: Size = 32


class _Idefics3Model(msgspec.Struct, frozen=True):
    image_token_id: Annotated[int, Meta(ge=0)] = 128_257
    scale_factor: Annotated[int, Meta(ge=1, le=64)] = 2
    vision_config: _Idefics3Vision = _Idefics3Vision()


class _Idefics3Processor(Steps, frozen=True, kw_only=True):
    """The fields as Pillow's processor in transformers has them, with its defaults."""

    size: _Edge
    max_image_size: _Edge
    resample: int = LANCZOS
    do_image_splitting: bool = True


def read(model_file: FoundFile, processor_file: FoundFile) -> Idefics3Config:
    """Raises ConfigError."""
    model = decoded(model_file, _Idefics3Model)
    path = processor_file.path
    processor, vision = decoded(processor_file, _Idefics3Processor), model.vision_config
    check_steps(processor, path)
    check_resample(processor.resample, LANCZOS, "Lanczos", path)
    _check_sizes(processor, vision, path)
    patches = max(1, vision.image_size // vision.patch_size)
    sizes = (vision.image_size, vision.patch_size, model.scale_factor)
    return Idefics3Config(
        tile_size=processor.max_image_size.longest_edge,
        tokens_per_tile=patches**2 // model.scale_factor**2,
        image_token_id=model.image_token_id,
        digest=digest_of(processor_file.data, sizes),
        longest_edge=processor.size.longest_edge,
        is_split=processor.do_image_splitting,
    )


def _check_sizes(processor: _Idefics3Processor, vision: _Idefics3Vision, path: Path) -> None:
    """Raises ConfigError."""
    tile, longest = processor.max_image_size.longest_edge, processor.size.longest_edge
    if tile != vision.image_size:
        raise ConfigError(
            f"{path}: max_image_size {tile} is not vision_config.image_size, {vision.image_size}"
        )
    if tile > MAX_TILE_SIZE or longest > tile * MAX_TILES_ASIDE:
        raise ConfigError(
            f"{path}: tiles of {tile} in images of {longest} pixels; the limits are "
            f"{MAX_TILE_SIZE} and {MAX_TILES_ASIDE} tiles in a row"
        )
