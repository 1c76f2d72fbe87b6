"""How Kimi K2.5 takes images, from a checkpoint's files."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.images.families.config_files import (
    HALF,
    FoundFile,
    decoded,
    digest_of,
)
from shared.errors import ConfigError

MODEL_TYPES = ("kimi_k25",)
MAX_PATCHES_ASIDE = 512
MAX_PATCHES = 65_536

Grid = tuple[int, int]  # rows and columns of tokens


class KimiConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An image keeps its size, unless it has more than `max_patches` patches, or more than
    `max_patches_aside` in a row or column. A square of `merge_size` patches is a token.
    """

    patch_size: int
    merge_size: int
    max_patches: int
    max_patches_aside: int
    image_token_id: int
    digest: bytes

    @property
    def token_size(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge_size

    def pixel_shape(self, grid: Grid) -> tuple[int, ...]:
        return 1, 3, grid[0] * self.token_size, grid[1] * self.token_size

    def num_tokens(self, grid: Grid) -> int:
        return grid[0] * grid[1]


class _KimiModel(msgspec.Struct, frozen=True):
    media_placeholder_token_id: Annotated[int, Meta(ge=0)] | None = None
    image_token_id: Annotated[int, Meta(ge=0)] = 163_605
    vision_config: dict[str, Any] | None = None


class _Media(msgspec.Struct, frozen=True):
    """The fields of `media_proc_cfg` that are about single images."""

    patch_size: Annotated[int, Meta(ge=1, le=64)] = 14
    merge_kernel_size: Annotated[int, Meta(ge=1, le=8)] = 2
    in_patch_limit: Annotated[int, Meta(ge=1, le=MAX_PATCHES)] = 16_384
    patch_limit_on_one_side: Annotated[int, Meta(ge=1, le=MAX_PATCHES_ASIDE)] = 512
    fixed_output_tokens: int | None = None
    image_mean: tuple[float, ...] = HALF
    image_std: tuple[float, ...] = HALF


class _KimiProcessor(msgspec.Struct, frozen=True):
    media_proc_cfg: _Media


def read(model_file: FoundFile, processor_file: FoundFile) -> KimiConfig | None:
    """Returns None for a checkpoint of the text part. Raises ConfigError."""
    model = decoded(model_file, _KimiModel)
    if model.vision_config is None:
        return None
    path = processor_file.path
    media = decoded(processor_file, _KimiProcessor).media_proc_cfg
    if media.fixed_output_tokens is not None:
        raise ConfigError(f"{path}: fixed_output_tokens is not supported, only null")
    if (media.image_mean, media.image_std) != (HALF, HALF):
        raise ConfigError(f"{path}: image_mean and image_std must be {list(HALF)}")
    token_id = model.media_placeholder_token_id
    return KimiConfig(
        patch_size=media.patch_size,
        merge_size=media.merge_kernel_size,
        max_patches=media.in_patch_limit,
        max_patches_aside=media.patch_limit_on_one_side,
        image_token_id=model.image_token_id if token_id is None else token_id,
        digest=digest_of(processor_file.data, ()),
    )
