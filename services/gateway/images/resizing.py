"""Resizes images of any mode in RGB, with no complete copy in RGB: one takes four bytes a pixel.

    rows of the image ──▶ on white, in RGB ──▶ resized across ──▶ all of them resized down

Pillow resizes across and then down, too, and rounds to 8 bits in between: the pixels are the same.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

BAND_ROWS = 64  # rows that are converted at once
_DEEP = ("I;16", "I;16B", "I;16L", "I;16N")  # 16 bits a pixel


def resized(image: Image.Image, size: tuple[int, int], resample: Image.Resampling) -> Image.Image:
    """Returns the image in RGB and of this size, transparent pixels on white."""
    if image.mode == "RGB" and not _has_transparency(image):
        return image.resize(size, resample)
    across = Image.new("RGB", (size[0], image.height))
    for top in range(0, image.height, BAND_ROWS):
        band = image.crop((0, top, image.width, min(top + BAND_ROWS, image.height)))
        band.info = image.info  # a transparent colour is in it
        across.paste(in_rgb(band).resize((size[0], band.height), resample), (0, top))
    return across.resize(size, resample)


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
