"""What turns images into a family's pixels and prompts. Loads Pillow and numpy."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from services.gateway.images.input_image import Detail
from services.gateway.images.resizing import Source

Grid = tuple[int, int]  # rows and columns, as of `ImagePart`
Pixels = npt.NDArray[np.uint8]


class Processor(Protocol):
    place: str  # what a chat template writes for an image

    def grid_of(self, width: int, height: int, detail: Detail = "auto") -> Grid:
        """Returns the grid of an image of this size."""
        ...

    def pixels_of(self, image: Source, detail: Detail = "auto") -> Pixels:
        """Returns the pixels of an image of any mode in RGB, [tiles, 3, H, W]; workers normalise
        them.
        """
        ...

    def placeholder(self, grid: Grid) -> str:
        """Returns the text that stands for the image in a prompt."""
        ...


def planes(image: Image.Image) -> Pixels:
    """Returns [3, height, width]."""
    return np.asarray(image).transpose(2, 0, 1)


def tiles_of(canvas: Pixels, tile: int) -> Pixels:
    """canvas [3, rows · tile, columns · tile] -> [rows · columns, 3, tile, tile], row by row."""
    rows, columns = canvas.shape[1] // tile, canvas.shape[2] // tile
    cut = canvas.reshape(3, rows, tile, columns, tile).transpose(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, 3, tile, tile)
