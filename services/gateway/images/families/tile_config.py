"""What families have in common whose images are square tiles and one tile of all of it."""

from __future__ import annotations

import msgspec

MAX_TILES_ASIDE = 16
MAX_TILE_SIZE = 2048
Grid = tuple[int, int]  # rows and columns of tiles; (0, 0): the image is one tile


class TileConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Tiles are `tile_size` pixels wide and high; each takes `tokens_per_tile` tokens of the
    prompt. `digest`: of the files that say so.
    """

    tile_size: int
    tokens_per_tile: int
    image_token_id: int
    digest: bytes

    def pixel_shape(self, grid: Grid) -> tuple[int, ...]:
        return num_tiles(grid), 3, self.tile_size, self.tile_size

    def num_tokens(self, grid: Grid) -> int:
        return num_tiles(grid) * self.tokens_per_tile


def num_tiles(grid: Grid) -> int:
    return grid[0] * grid[1] + 1
