"""Pixels and vectors of an image as frames of the data plane.

A frame holds `num_tokens` bytes from byte `first_token` on; it has one layer and one head. Its
placement is the transfer, one try to fetch one image.
"""

from __future__ import annotations

from math import prod

from shared.errors import FrameRefused
from shared.kv_wire.link import FrameHeader
from shared.numerics import Numerics

IMAGES_FEATURE = "images/1"  # a worker with it encodes the images of prompts
PIXEL_FORMAT = "pixels/1"  # takes the place of a format of KV
VECTOR_FORMAT = "vectors/1"  # likewise: of the encoded image
MAX_IMAGE_BYTES = 64 << 20
_NUMERICS = Numerics("exact", "none", "uint8", "none")  # pixels are not computed


def byte_header(
    transfer_id: bytes,
    number: int,
    first_byte: int,
    num_bytes: int,
    byte_format: str = PIXEL_FORMAT,
) -> FrameHeader:
    """Returns the header of a frame of pixels, or of what else `byte_format` names."""
    return FrameHeader(
        placement_id=transfer_id,
        sequence_number=number,
        first_token=first_byte,
        num_tokens=num_bytes,
        first_layer=0,
        num_layers=1,
        first_head=0,
        num_heads=1,
        kv_format=byte_format,
        num_cached_tokens=0,
        payload_bytes=num_bytes,
        numerics=_NUMERICS,
    )


def check_byte_header(
    header: FrameHeader, next_byte: int, num_bytes: int, byte_format: str = PIXEL_FORMAT
) -> None:
    """Raises FrameRefused unless the frame holds the next bytes of `num_bytes` in `byte_format`."""
    if header.kv_format != byte_format or header.payload_bytes != header.num_tokens:
        raise FrameRefused(f"a frame of {header.kv_format}, expected {byte_format}")
    end = header.first_token + header.num_tokens
    if header.first_token != next_byte or end > num_bytes:
        raise FrameRefused(
            f"bytes {header.first_token} to {end} of an image, expected {next_byte} to {num_bytes}"
        )


def image_bytes(shape: tuple[int, ...]) -> int:
    """Returns the bytes of uint8 pixels of this shape."""
    return prod(shape)
