"""Resizes images of any mode in RGB, with no complete copy in RGB: one takes four bytes a pixel.

    rows of the image    ──▶ on white, in RGB ──▶ resized across ──▶ all of them resized down
    columns of the image ──▶ on white, in RGB ──▶ resized down ──▶ all of them resized across

The passes are those of Pillow, in its order, as it rounds to 8 bits in between, too. Pillow 13
resizes down first what loses more than twice as many rows as columns: see `_is_down_first`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import PIL
from PIL import Image

from services.gateway.images.png_rows import PngRows

Source = Image.Image | PngRows
Size = tuple[int, int]  # width, height
BAND_ROWS = 64  # rows, or columns, that are converted at once
_HAS_ORDERS = int(PIL.__version__.partition(".")[0]) >= 13  # of passes; before, across is first
_DEEP = ("I;16", "I;16B", "I;16L", "I;16N")  # 16 bits a pixel


def resized(image: Source, size: tuple[int, int], resample: Image.Resampling) -> Image.Image:
    """Returns the image in RGB and of this size, transparent pixels on white. Raises what decoding
    an image raises that is not decoded yet.
    """
    if isinstance(image, Image.Image) and image.mode == "RGB" and not _has_transparency(image):
        return image.resize(size, resample)
    are_columns = False
    if not _is_down_first(image.size, size):
        bands, one_way = _rows(image), (size[0], image.size[1])
    elif isinstance(image, Image.Image):
        bands, one_way, are_columns = _columns(image), (image.width, size[1]), True
    else:  # rows come once: all of them are kept, in three bytes a pixel
        bands, one_way = _rows(image), image.size
    planes = _joined(bands, one_way, resample, are_columns=are_columns)
    # one after the other, so that what is complete is not beside what is resized one way
    return Image.merge("RGB", [planes.pop(0).resize(size, resample) for _ in "RGB"])


def _is_down_first(before: Size, after: Size) -> bool:
    """Returns whether Pillow resizes this shape down, and then across."""
    num_columns, num_rows = before[0] - after[0], before[1] - after[1]  # that are lost
    return _HAS_ORDERS and num_rows > max(0, 2 * num_columns)


def _joined(
    bands: Iterator[Image.Image], size: Size, resample: Image.Resampling, *, are_columns: bool
) -> list[Image.Image]:
    """Returns red, green and blue of all bands, each of which is resized to the width of `size`, or
    to its height if they are columns.
    """
    planes, start = [Image.new("L", size) for _ in "RGB"], 0
    for band in bands:
        shape = (band.width, size[1]) if are_columns else (size[0], band.height)
        colours = in_rgb(band).resize(shape, resample).split()
        for plane, colour in zip(planes, colours, strict=True):
            plane.paste(colour, (start, 0) if are_columns else (0, start))
        start += band.width if are_columns else band.height
    return planes


def _rows(image: Source) -> Iterator[Image.Image]:
    if isinstance(image, PngRows):
        yield from image.bands(BAND_ROWS)
        return
    for top in range(0, image.height, BAND_ROWS):
        yield _part(image, (0, top, image.width, min(top + BAND_ROWS, image.height)))


def _columns(image: Image.Image) -> Iterator[Image.Image]:
    for left in range(0, image.width, BAND_ROWS):
        yield _part(image, (left, 0, min(left + BAND_ROWS, image.width), image.height))


def _part(image: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    part = image.crop(box)
    part.info = image.info  # a transparent colour is in it
    return part


def in_rgb(image: Image.Image) -> Image.Image:
    """Converts to RGB, transparent pixels on white, as the processors of transformers do."""
    if image.mode in _DEEP:
        eight_bits = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return Image.fromarray(eight_bits).convert("RGB")
    if _has_transparency(image):
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")  # which copies


def _has_transparency(image: Image.Image) -> bool:
    return "A" in image.getbands() or image.info.get("transparency") is not None
