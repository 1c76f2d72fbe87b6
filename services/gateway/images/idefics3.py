"""The image processor of Idefics3 and SmolVLM, as the one of transformers on Pillow: the same
pixels, in uint8; workers normalise them.

    resize to the longest edge ──▶ resize to multiples of a tile ──▶ rows × columns of tiles
                                                                 └──▶ all of it in one more tile
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from services.gateway.images.config import IMAGE_TOKEN, ImageConfig
from services.gateway.images.input_image import Detail

Grid = tuple[int, int]  # rows and columns of tiles; (0, 0): the image is one tile
MAX_EDGE = 4096  # pixels, whatever a checkpoint says
FAKE_TOKEN = "<fake_token_around_image>"
GLOBAL_TOKEN = "<global-img>"


def num_tiles(grid: Grid) -> int:
    return grid[0] * grid[1] + 1


def tiled_size(width: int, height: int, config: ImageConfig, detail: Detail) -> list[Grid]:
    """Returns the sizes, (width, height), to which the image is resized one after the other."""
    tile = config.tile_size
    longest = tile if detail == "low" else config.longest_edge
    first = _below(MAX_EDGE, *_to_longest_edge(longest, width, height))
    return [first, _to_multiples(tile, *first) if config.is_split else (tile, tile)]


def grid_of(width: int, height: int, config: ImageConfig, detail: Detail = "auto") -> Grid:
    """Returns the tiles of an image of this size."""
    tile = config.tile_size
    width, height = tiled_size(width, height, config, detail)[-1]
    return (0, 0) if (width, height) == (tile, tile) else (height // tile, width // tile)


def tiles_of(
    image: Image.Image, config: ImageConfig, detail: Detail = "auto"
) -> npt.NDArray[np.uint8]:
    """Returns the tiles of an image in RGB, [tiles, 3, tile_size, tile_size]: those of its grid row
    by row, then the complete image.
    """
    grid, tile = grid_of(*image.size, config, detail), config.tile_size
    for size in tiled_size(*image.size, config, detail):
        image = image.resize(size, Image.Resampling.LANCZOS)
    tiles = np.empty((num_tiles(grid), 3, tile, tile), np.uint8)
    rows, columns = grid
    for index in range(rows * columns):
        top, left = index // columns * tile, index % columns * tile
        tiles[index] = _pixels(image.crop((left, top, left + tile, top + tile)))
    if grid != (0, 0):
        image = image.resize((tile, tile), Image.Resampling.LANCZOS)
    tiles[-1] = _pixels(image)
    return tiles


def placeholder(grid: Grid, tokens_per_tile: int) -> str:
    """Returns the text that stands for the image in a prompt."""
    tokens, (rows, columns) = IMAGE_TOKEN * tokens_per_tile, grid
    lines = [
        "".join(f"{FAKE_TOKEN}<row_{row}_col_{column}>{tokens}" for column in _from_1(columns))
        for row in _from_1(rows)
    ]
    split = "".join(f"{line}\n" for line in lines)
    end = "\n" if lines else ""
    return f"{split}{end}{FAKE_TOKEN}{GLOBAL_TOKEN}{tokens}{FAKE_TOKEN}"


def _from_1(count: int) -> range:
    return range(1, count + 1)


def _pixels(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Returns [3, height, width]."""
    return np.asarray(image).transpose(2, 0, 1)


def _to_longest_edge(longest: int, width: int, height: int) -> tuple[int, int]:
    """Keeps the aspect ratio; the shorter edge becomes even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _below(limit: int, width: int, height: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > limit:
        width, height = limit, int(limit / ratio)
    elif height > width and height > limit:
        width, height = int(limit * ratio), limit
    return max(width, 1), max(height, 1)


def _to_multiples(tile: int, width: int, height: int) -> tuple[int, int]:
    """Rounds both edges up to multiples of a tile."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = int(width / ratio)
    else:
        height = math.ceil(height / tile) * tile
        width = int(height * ratio)
    return math.ceil(width / tile) * tile, math.ceil(height / tile) * tile
