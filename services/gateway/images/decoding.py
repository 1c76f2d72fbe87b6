"""Decodes an image of a client, in a process with limits. What its header says is checked before a
pixel is decoded.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO

from PIL import (
    GifImagePlugin,  # noqa: F401  that registers its format, as the next ones
    Image,
    ImageFile,
    ImageOps,
    JpegImagePlugin,  # noqa: F401
    PngImagePlugin,  # noqa: F401
    WebPImagePlugin,  # noqa: F401
)

from services.gateway.images.input_image import MEDIA_TYPES, InputImage, bad_image
from services.gateway.images.png_rows import PngRows, png_rows

MAX_SIDE = 16_384  # pixels
ROWS_FROM_PIXELS = 4_000_000  # a PNG of so many pixels is decoded by its rows
OPENED = ("JPEG", "PNG", "WEBP", "GIF")
# MPO: what cameras call a JPEG with a preview beside it
FORMATS = {**dict(zip(OPENED, MEDIA_TYPES, strict=True)), "MPO": "image/jpeg"}

Image.MAX_IMAGE_PIXELS = None  # ours is the limit
ImageFile.LOAD_TRUNCATED_IMAGES = False


def decoded(image: InputImage, *, max_pixels: int) -> Image.Image | PngRows:
    """Returns the first frame in the file's own mode, upright as its EXIF says; of most large PNGs
    what decodes its rows. Raises InvalidRequest, which names the image.
    """
    data = image.content
    if not data:
        raise bad_image(image.place, "the image has no bytes")
    with naming(image.place), _opened(image, data, max_pixels) as opened:
        if opened.width * opened.height >= ROWS_FROM_PIXELS:
            rows = png_rows(opened, data)
            if rows is not None:
                return rows
        opened.load()
        _turn_upright(opened)
        return opened


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Raises InvalidRequest, which names the image, for what Pillow raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd metadata
        try:
            yield
        except MemoryError:
            raise bad_image(place, "the image takes too much memory to decode") from None
        except (OSError, SyntaxError, ValueError, EOFError, ArithmeticError) as error:
            raise bad_image(place, f"the image cannot be decoded: {_short(error)}") from None
        except (TypeError, LookupError, AttributeError, struct.error) as error:
            reason = f"the image cannot be decoded: {type(error).__name__}"
            raise bad_image(place, reason) from None


def _opened(image: InputImage, data: bytes, max_pixels: int) -> Image.Image:
    """Returns the image with its header read. Raises InvalidRequest."""
    size = webp_size(data)
    if size is not None:  # Pillow makes room for the pixels as it opens one
        check_size(image.place, size, max_pixels)
    try:
        opened = Image.open(BytesIO(data), formats=OPENED)
    except Image.UnidentifiedImageError:
        kinds = ", ".join(MEDIA_TYPES)
        raise bad_image(image.place, f"the data is not a complete image of {kinds}") from None
    check_size(image.place, opened.size, max_pixels)
    found = FORMATS[opened.format or ""]
    if image.media_type not in ("", found):
        raise bad_image(image.place, f"the image is {found}, and not {image.media_type}")
    return opened


def check_size(place: str, size: tuple[int, int], max_pixels: int) -> None:
    """Raises InvalidRequest for too large an image."""
    width, height = size
    if max(size) > MAX_SIDE:
        raise bad_image(place, f"a side of {max(size)} pixels is more than {MAX_SIDE}")
    if width * height > max_pixels:
        raise bad_image(place, f"{width} x {height} pixels are more than {max_pixels}")
    if min(size) < 1:
        raise bad_image(place, "the image has no pixels")


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Returns the width and height that the header of a WebP says, or None for other data."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    match data[12:16]:
        case b"VP8X":
            sides = (data[24:27], data[27:30])
            width, height = (1 + int.from_bytes(each, "little") for each in sides)
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            width, height = (each & 0x3FFF for each in struct.unpack_from("<HH", data, 26))
        case _:
            return None
    return width, height


def _turn_upright(image: Image.Image) -> None:
    """Turns the image as its EXIF says, if that can be read. Copies no image that is upright."""
    with suppress(Exception):  # the metadata is the client's
        ImageOps.exif_transpose(image, in_place=True)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
