"""Decodes a PNG with transparency by bands of its rows: all of it would take four bytes a pixel.

    IDAT chunks ──inflate──▶ filtered rows of a band ──Pillow's decoder──▶ an image of these rows

A row's filter refers to the row above: that one goes before the band's, unfiltered. Reference:
Portable Network Graphics (PNG) Specification, third edition, sections 5, 9 and 10.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

from PIL import ExifTags, Image

PIXEL_BYTES = {"LA": 2, "RGB": 3, "RGBA": 4}  # of modes whose pixels are stored as they are decoded
TURNED = range(2, 9)  # orientations
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_INPUT_BYTES = 1 << 16  # that are inflated at once
_UNFILTERED = b"\0"
_OF_FRAMES = (b"acTL", b"fcTL", b"fdAT", b"DDAT")


@dataclass(frozen=True, slots=True)
class PngRows:
    """An image whose rows are not decoded yet. `mode`, `size`, `info`: as of Pillow's."""

    mode: str
    size: tuple[int, int]
    info: dict[Any, Any]
    _data: bytes

    def bands(self, num_rows: int) -> Iterator[Image.Image]:
        """Yields images of `num_rows` rows, and one of those that are left. Raises OSError,
        ValueError.
        """
        width, height = self.size
        row_bytes = 1 + width * PIXEL_BYTES[self.mode]
        inflated, above = _Inflated(_pixel_data(self._data)), b""
        for top in range(0, height, num_rows):
            count, num_above = min(num_rows, height - top), int(bool(above))
            rows = zlib.compress(above + inflated.read(count * row_bytes), level=0)
            size = (width, num_above + count)
            band = Image.frombytes(self.mode, size, rows, "zip", self.mode, 0)
            band = band.crop((0, num_above, *size))
            above = _UNFILTERED + band.crop((0, count - 1, width, count)).tobytes()
            band.info = self.info
            yield band


def png_rows(opened: Image.Image, data: bytes) -> PngRows | None:
    """Returns the rows of an image of which Pillow has read the header; None if it is no PNG that
    bands can be decoded of: opaque, interlaced, animated, turned by its EXIF, of other than eight
    bits a channel, or incomplete. Raises what Pillow does for its metadata.
    """
    if opened.format != "PNG" or opened.mode not in PIXEL_BYTES or opened.info.get("interlace"):
        return None
    layout = [(each.codec_name, each.args) for each in opened.tile]  # type: ignore[attr-defined]
    if layout != [("zip", opened.mode)]:
        return None
    first_row = _first_row(opened, data)
    if first_row is None or _is_turned(first_row):
        return None
    if opened.mode == "RGB" and "transparency" not in first_row.info:
        return None  # Pillow resizes it at once
    return PngRows(opened.mode, opened.size, first_row.info, data)


class _Chunk(NamedTuple):
    """`start`, `end`: of its contents, after eight bytes and before four of a checksum."""

    name: bytes
    start: int
    end: int


def _chunks(data: bytes) -> Iterator[_Chunk]:
    """Yields the complete chunks of a file. There may be millions."""
    at = len(_SIGNATURE)
    while at + 12 <= len(data):
        start, name = at + 8, data[at + 4 : at + 8]
        at = start + int.from_bytes(data[at : at + 4]) + 4
        if at <= len(data):
            yield _Chunk(name, start, at - 4)


def _pixel_data(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    for each in _chunks(data):
        if each.name == b"IDAT":
            for start in range(each.start, each.end, _INPUT_BYTES):
                yield view[start : min(start + _INPUT_BYTES, each.end)]


def _first_row(opened: Image.Image, data: bytes) -> Image.Image | None:
    """Returns an image of one black row and of all the metadata, also of that after the pixels;
    None for a file of frames, without an end, or whose pixels do not follow one another.
    """
    width = opened.width
    head = width.to_bytes(4) + (1).to_bytes(4) + data[24:29]
    row = zlib.compress(bytes(1 + width * PIXEL_BYTES[opened.mode]))
    file, last, num_rows = BytesIO(), b"", 0
    file.write(_SIGNATURE + _chunk(b"IHDR", head))
    for each in _chunks(data):
        if each.name == b"IDAT" != last:
            file.write(_chunk(b"IDAT", row))
            num_rows += 1
        elif each.name in _OF_FRAMES:
            return None
        elif each.name not in (b"IHDR", b"IDAT"):
            file.write(data[each.start - 8 : each.end + 4])
        last = each.name
    if last != b"IEND" or num_rows != 1:
        return None
    file.seek(0)
    found = Image.open(file, formats=("PNG",))
    found.load()
    return found


def _chunk(name: bytes, content: bytes) -> bytes:
    return len(content).to_bytes(4) + name + content + zlib.crc32(name + content).to_bytes(4)


def _is_turned(image: Image.Image) -> bool:
    with suppress(Exception):  # the metadata is the client's
        return image.getexif().get(ExifTags.Base.Orientation, 1) in TURNED
    return False


class _Inflated:
    """Inflates pieces of compressed data as far as they are read."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._inflate = zlib.decompressobj()

    def read(self, num_bytes: int) -> bytes:
        """Raises OSError for data that is broken, or that ends before."""
        found = bytearray()
        while len(found) < num_bytes:
            piece = self._inflate.unconsumed_tail or next(self._pieces, b"")
            try:
                some = self._inflate.decompress(piece, num_bytes - len(found))
            except zlib.error as error:
                raise OSError(f"broken PNG file: {error}") from None
            if not piece and not some:
                raise OSError("image file is truncated")
            found += some
        return bytes(found)
