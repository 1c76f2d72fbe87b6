"""An image as a client sent it: encoded, and not read yet."""

from __future__ import annotations

import binascii
import re
from typing import Literal

import msgspec

from shared.errors import InvalidRequest

Detail = Literal["auto", "low", "high"]
MEDIA_TYPES = ("image/jpeg", "image/png", "image/webp", "image/gif")
NO_IMAGES = "this model takes no images"  # in all dialects
NOT_FETCHED = "images are not fetched from addresses: send the image as a data URL"
_OTHER_NAMES = {"image/jpg": "image/jpeg"}
_DATA_URL = re.compile(r"data:(?P<type>[^;,]{0,128})(?P<options>(?:;[^;,]{0,128}){0,8}),", re.I)
_SPACES = b" \t\n\r\v\f"
_PIECE_CHARS = 1 << 16  # decoded at once, in 0.3 ms: other threads run in between
_SHORTER = (b"", bytes(range(10)), bytes(range(100)))  # than one, two and three digits
_NUMBERS = "an array of numbers from 0 to 255"


class InputImage(msgspec.Struct, frozen=True, array_like=True):
    """`place`: of the image in the request, which errors name. `data`: as sent, in base64 unless
    `is_decoded`. `media_type`: of MEDIA_TYPES; empty if the client names none. `address`: of an
    image that is not fetched yet, which has no data.
    """

    place: str
    data: bytes
    media_type: str = ""
    detail: Detail = "auto"
    is_decoded: bool = False
    address: str = ""

    @property
    def content(self) -> bytes:
        """The bytes of the image. Raises InvalidRequest for what is not base64, and for an image
        that was not fetched.
        """
        if self.address:
            raise bad_image(self.place, NOT_FETCHED)
        if self.is_decoded:
            return self.data
        try:
            return _decoded(self.data.translate(None, _SPACES))  # some clients write lines
        except ValueError as error:
            raise bad_image(self.place, f"the data is not base64: {error}") from None

    def num_sent_bytes(self, num_spaced: int) -> int:
        """Returns the bytes that the image takes in the body that it came in: one sent as numbers
        takes up to three digits and a comma for each. `num_spaced`: commas of the body that a space
        follows.
        """
        if not self.is_decoded:
            return len(self.data)
        num_digits = sum(len(self.data.translate(None, each)) for each in _SHORTER)
        return num_digits + len(self.data) + min(num_spaced, len(self.data))


class ImageContext(msgspec.Struct, frozen=True, array_like=True):
    """What a process needs besides a model's files to read images. `revision`: the digest of the
    model's weights. `max_images`: of a request. `max_pixels`: of an image. `max_text_bytes`: of a
    body without its images; None: no limit.
    """

    revision: str = ""
    max_images: int = 0
    max_pixels: int = 0
    max_text_bytes: int | None = None


def _decoded(text: bytes) -> bytes:
    """Raises ValueError for what is not base64."""
    found = bytearray()
    for start in range(0, len(text), _PIECE_CHARS):
        piece = text[start : start + _PIECE_CHARS]
        found += binascii.a2b_base64(piece, strict_mode=True)
        if piece.endswith(b"=") and start + len(piece) < len(text):
            raise ValueError("Excess data after padding")
    return bytes(found)


def bad_image(place: str, reason: str) -> InvalidRequest:
    """Returns the error for an image that cannot be read."""
    return InvalidRequest(f"{place}: {reason}", param=place)


def image_of_url(place: str, url: str, detail: Detail = "auto") -> InputImage:
    """Returns the image of a data URL, or of an address, whose host the operator may allow. Raises
    InvalidRequest for any other URL.
    """
    found = _DATA_URL.match(url)
    if found is None:
        if url[:16].partition(":")[0].lower() in ("http", "https"):
            return InputImage(place, b"", detail=detail, address=url)
        raise bad_image(place, "the URL of an image must be a data URL: data:image/png;base64,…")
    if not found["options"].lower().endswith(";base64"):
        raise bad_image(place, "the data URL must be in base64: data:image/png;base64,…")
    return image_of_base64(place, url[found.end() :], found["type"], detail)


def image_of_base64(
    place: str, data: str, media_type: str = "", detail: Detail = "auto"
) -> InputImage:
    """Returns the image of a text in base64. Raises InvalidRequest for a type that is not read."""
    known = media_type.strip().lower()
    known = _OTHER_NAMES.get(known, known)
    if known and known not in MEDIA_TYPES:
        raise bad_image(place, f"{media_type[:64]!r} is not one of {', '.join(MEDIA_TYPES)}")
    return InputImage(place, data.encode(), known, detail)


def image_of_numbers(place: str, numbers: list[int]) -> InputImage:
    """Returns the image whose bytes are given as numbers. Raises InvalidRequest for others."""
    try:
        return InputImage(place, bytes(numbers), is_decoded=True)
    except (TypeError, ValueError):
        raise bad_image(place, f"the image must be in base64, or {_NUMBERS}") from None
