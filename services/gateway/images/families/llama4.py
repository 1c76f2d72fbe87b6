"""The image processor of Llama 4, on Pillow.

    the canvas of tiles that fits best ──▶ resize into it, zeros right and below ──▶ tiles
                                      └──▶ if several: all of the image, stretched to one more

A canvas fits best that enlarges the image least, or else shrinks it least; of several the smallest.
transformers compares these scales in FP32, and so does this.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from services.gateway.images.families.llama4_config import Llama4Config
from services.gateway.images.families.processor import Grid, Pixels, planes, tiles_of
from services.gateway.images.input_image import Detail
from services.gateway.images.resizing import Source, resized

PATCH = "<|patch|>"
START, END = "<|image_start|>", "<|image_end|>"
NEXT_COLUMN, NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"


class Llama4Processor:
    """A `Processor`."""

    place = "<|image|>"

    def __init__(self, config: Llama4Config) -> None:
        self.config = config

    def grid_of(self, width: int, height: int, detail: Detail = "auto") -> Grid:
        canvas = self._canvas(width, height, detail)
        return (0, 0) if canvas == (1, 1) else canvas

    def pixels_of(self, image: Source, detail: Detail = "auto") -> Pixels:
        tile, (rows, columns) = self.config.tile_size, self._canvas(*image.size, detail)
        size = self._size_within(image.size, (columns * tile, rows * tile))
        canvas = np.zeros((3, rows * tile, columns * tile), np.uint8)
        canvas[:, : size[1], : size[0]] = planes(resized(image, size, Image.Resampling.BILINEAR))
        tiles = tiles_of(canvas, tile)
        if len(tiles) == 1:
            return tiles
        complete = resized(image, (tile, tile), Image.Resampling.BILINEAR)
        return np.concatenate([tiles, planes(complete)[np.newaxis]])

    def placeholder(self, grid: Grid) -> str:
        tile, (rows, columns) = PATCH * self.config.tokens_per_tile, grid
        row = NEXT_COLUMN.join([tile] * columns) + NEXT_ROW
        return f"{START}{row * rows}{self.place}{tile}{END}"

    def _canvas(self, width: int, height: int, detail: Detail) -> Grid:
        """Returns the rows and columns of tiles of the canvas that fits best."""
        tile, most = self.config.tile_size, 1 if detail == "low" else self.config.max_tiles
        grids = [(r, c) for r in range(1, most + 1) for c in range(1, most // r + 1)]
        sides = np.array(grids, np.float32) * np.float32(tile)
        scales = (sides / np.array([height, width], np.float32)).min(axis=1)
        larger = scales[scales >= 1]
        if len(larger):
            chosen = larger.max() if self.config.fills_canvas else larger.min()
        else:
            chosen = scales.max()
        fitting = [each for each, scale in zip(grids, scales, strict=True) if scale == chosen]
        return min(fitting, key=math.prod)

    def _size_within(self, size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
        """Returns the size, (width, height), of the image on its canvas, at its aspect ratio."""
        (width, height) = size
        most_width, most_height = (self._limit(*each) for each in zip(size, canvas, strict=True))
        across, down = most_width / width, most_height / height
        if across < down:
            width, height = int(most_width), min(math.floor(height * across), int(most_height))
        else:
            width, height = min(math.floor(width * down), int(most_width)), int(most_height)
        return max(1, width), max(1, height)

    def _limit(self, side: int, canvas: int) -> int | np.float32:
        """Returns the most pixels of a side on its canvas: in FP32 where that of the canvas
        decides, as transformers' rounding follows from it.
        """
        most = max(side, self.config.tile_size)
        return np.float32(canvas) if self.config.fills_canvas or canvas < most else most
