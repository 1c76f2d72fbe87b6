"""Resizes images of any mode in RGB, with no complete copy in RGB: one takes four bytes a pixel.

    rows of the image ──▶ on white, in RGB ──▶ resized across ──▶ all of them resized down

The passes are those of Pillow, which rounds to 8 bits in between, too. (Pillow 13 resizes some
shapes down first, as those that become wider and lower: there the pixels are not quite the same.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image

from services.gateway.images.png_rows import PngRows

Source = Image.Image | PngRows
BAND_ROWS = 64  # rows that are converted at once
_DEEP = ("I;16", "I;16B", "I;16L", "I;16N")  # 16 bits a pixel


def resized(image: Source, size: tuple[int, int], resample: Image.Resampling) -> Image.Image:
    """Returns the image in RGB and of this size, transparent pixels on white. Raises what decoding
    an image raises that is not decoded yet.
    """
    if isinstance(image, Image.Image) and image.mode == "RGB" and not _has_transparency(image):
        return image.resize(size, resample)
    across, top = [Image.new("L", (size[0], image.size[1])) for _ in "RGB"], 0
    for band in _bands(image):
        colours = in_rgb(band).resize((size[0], band.height), resample).split()
        for plane, colour in zip(across, colours, strict=True):
            plane.paste(colour, (0, top))
        top += band.height
    # one after the other, so that what is complete is not beside what was across
    return Image.merge("RGB", [across.pop(0).resize(size, resample) for _ in "RGB"])


def _bands(image: Source) -> Iterator[Image.Image]:
    if isinstance(image, PngRows):
        yield from image.bands(BAND_ROWS)
        return
    for top in range(0, image.height, BAND_ROWS):
        band = image.crop((0, top, image.width, min(top + BAND_ROWS, image.height)))
        band.info = image.info  # a transparent colour is in it
        yield band


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
