"""The image processor of Idefics3 and SmolVLM, as the one of transformers on Pillow: the same
pixels.

    resize to the longest edge ──▶ resize to multiples of a tile ──▶ rows × columns of tiles
                                                                 └──▶ all of it in one more tile
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from services.gateway.images.families.idefics3_config import Idefics3Config
from services.gateway.images.families.processor import Grid, Pixels, planes, tiles_of
from services.gateway.images.input_image import Detail
from services.gateway.images.resizing import Source, resized

MAX_EDGE = 4096  # pixels, whatever a checkpoint says
IMAGE_TOKEN = "<image>"
FAKE_TOKEN = "<fake_token_around_image>"
GLOBAL_TOKEN = "<global-img>"


class Idefics3Processor:
    """A `Processor`."""

    place = IMAGE_TOKEN

    def __init__(self, config: Idefics3Config) -> None:
        self.config = config

    def grid_of(self, width: int, height: int, detail: Detail = "auto") -> Grid:
        tile = self.config.tile_size
        width, height = self._sizes(width, height, detail)[-1]
        return (0, 0) if (width, height) == (tile, tile) else (height // tile, width // tile)

    def pixels_of(self, image: Source, detail: Detail = "auto") -> Pixels:
        grid, tile = self.grid_of(*image.size, detail), self.config.tile_size
        first, *others = self._sizes(*image.size, detail)
        canvas = resized(image, first, Image.Resampling.LANCZOS)
        for size in others:
            canvas = resized(canvas, size, Image.Resampling.LANCZOS)
        if grid == (0, 0):
            return planes(canvas)[np.newaxis]
        complete = resized(canvas, (tile, tile), Image.Resampling.LANCZOS)
        return np.concatenate([tiles_of(planes(canvas), tile), planes(complete)[np.newaxis]])

    def placeholder(self, grid: Grid) -> str:
        tokens, (rows, columns) = IMAGE_TOKEN * self.config.tokens_per_tile, grid
        lines = [
            "".join(f"{FAKE_TOKEN}<row_{row}_col_{column}>{tokens}" for column in _from_1(columns))
            for row in _from_1(rows)
        ]
        split = "".join(f"{line}\n" for line in lines)
        end = "\n" if lines else ""
        return f"{split}{end}{FAKE_TOKEN}{GLOBAL_TOKEN}{tokens}{FAKE_TOKEN}"

    def _sizes(self, width: int, height: int, detail: Detail) -> list[tuple[int, int]]:
        """Returns the sizes, (width, height), to which the image is resized one after the other."""
        tile = self.config.tile_size
        longest = tile if detail == "low" else self.config.longest_edge
        first = _below(MAX_EDGE, *_to_longest_edge(longest, width, height))
        return [first, _to_multiples(tile, *first) if self.config.is_split else (tile, tile)]


def _from_1(count: int) -> range:
    return range(1, count + 1)


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
