"""The descriptions of image encoders, which put vectors in place of a prompt's image tokens.

Each takes the uint8 pixels of an image, [tiles, 3, H, W], one tile after the other, and returns
vectors of `output_size`, the text model's width, for the tokens of the id `image_token_id`.
"""

from __future__ import annotations

import msgspec

from shared.engine.model_config.checkpoint_form import (
    VISION_OF_IDEFICS,
    VISION_OF_KIMI,
    VISION_OF_LLAMA4,
    CheckpointForm,
)

Grid = tuple[int, int]  # rows and columns, as of `ImagePart`


class _TileConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tiles are `image_size` pixels wide and high; each becomes `tokens_per_tile` tokens. An image
    has the tiles of its grid, and one more of the complete image.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    scale_factor: int
    image_token_id: int
    output_size: int

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def tokens_per_tile(self) -> int:
        side: int = self.patches_per_side // self.scale_factor
        return side * side

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        return 3, self.image_size, self.image_size

    def pixel_shape(self, grid: Grid) -> tuple[int, ...]:
        return grid[0] * grid[1] + 1, *self.tile_shape

    def num_tokens(self, grid: Grid) -> int:
        return (grid[0] * grid[1] + 1) * self.tokens_per_tile


class SiglipConfig(_TileConfig, frozen=True, kw_only=True, omit_defaults=True):
    """The encoder of SmolVLM and Idefics 3: its patches are shuffled in squares of `scale_factor`
    to single vectors, and projected.
    """

    @property
    def form(self) -> CheckpointForm:
        return VISION_OF_IDEFICS


class Llama4VisionConfig(_TileConfig, frozen=True, kw_only=True, omit_defaults=True):
    """The encoder of Llama 4: patches with a rotary embedding of two axes, shuffled in squares of
    `scale_factor`, then an adapter of two layers from `adapter_size` to `adapter_output_size`.
    """

    rope_theta: float
    adapter_size: int
    adapter_output_size: int

    @property
    def form(self) -> CheckpointForm:
        return VISION_OF_LLAMA4


class MoonVitConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """MoonViT, the encoder of Kimi K2.5: an image of any size is one tile.

    A grid counts squares of `merge_size` patches in rows and columns, each of which is a token.
    Learned positions are those of `position_rows` × `position_columns` patches.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    merge_size: int
    position_rows: int
    position_columns: int
    projector_eps: float
    image_token_id: int
    output_size: int

    @property
    def form(self) -> CheckpointForm:
        return VISION_OF_KIMI

    def pixel_shape(self, grid: Grid) -> tuple[int, ...]:
        side = self.merge_size * self.patch_size
        return 1, 3, grid[0] * side, grid[1] * side

    def num_tokens(self, grid: Grid) -> int:
        return grid[0] * grid[1]


VisionConfig = SiglipConfig | Llama4VisionConfig | MoonVitConfig
