"""The image processor of Kimi K2.5, as the published one on Pillow: the same pixels.

shrink, if it has too many patches ──▶ zeros at the right and the bottom, to whole tokens
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from services.gateway.images.families.kimi_config import KimiConfig
from services.gateway.images.families.processor import Grid, Pixels, planes
from services.gateway.images.input_image import Detail
from services.gateway.images.resizing import Source, resized

LOW_PATCHES = 1024  # of an image in low detail


class KimiProcessor:
    """A `Processor`."""

    place = "<|media_pad|>"

    def __init__(self, config: KimiConfig) -> None:
        self.config = config

    def grid_of(self, width: int, height: int, detail: Detail = "auto") -> Grid:
        width, height = self._size(width, height, detail)
        side = self.config.token_size
        return math.ceil(height / side), math.ceil(width / side)

    def pixels_of(self, image: Source, detail: Detail = "auto") -> Pixels:
        size = self._size(*image.size, detail)
        pixels = np.zeros(self.config.pixel_shape(self.grid_of(*image.size, detail)), np.uint8)
        pixels[0, :, : size[1], : size[0]] = planes(resized(image, size, Image.Resampling.BICUBIC))
        return pixels

    def placeholder(self, grid: Grid) -> str:
        return self.place * self.config.num_tokens(grid)

    def _size(self, width: int, height: int, detail: Detail) -> tuple[int, int]:
        """Returns the size, (width, height), without what fills its tokens."""
        patch, most = self.config.patch_size, self.config.max_patches
        if detail == "low":
            most = min(most, LOW_PATCHES)
        longest = self.config.max_patches_aside * patch
        patches = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(most / patches), longest / width, longest / height)
        return min(max(1, int(width * scale)), longest), min(max(1, int(height * scale)), longest)
