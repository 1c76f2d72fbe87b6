"""Hostile images, made from a number: no file of others is needed, and each can be made again."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

from PIL import Image

TYPES = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp", "GIF": "image/gif"}
MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
}
SIDES = (1, 2, 3, 7, 16, 31, 64, 97, 200)
LARGE = (0, 1, 0x7FFF, 0x8000, 0xFFFF, 20_000, 50_001, 0x7FFFFFFF, 0xFFFFFFFF)
MARKERS = (b"\xff\xc0", b"\xff\xda", b"IHDR", b"IDAT", b"tRNS", b"VP8X", b"ALPH", b"ANIM", b"\x2c")
NAMES = ("image/png", "image/jpeg", "image/svg+xml", "text/html", "", "image/png\r\n", "a" * 300)
Draw = random.Random


def hostile_image(number: int) -> tuple[bytes, str]:
    """Returns the bytes of an image, most of them damaged, and the type that a client would say."""
    draw = Draw(number)
    kind = draw.choice([*TYPES])
    make = draw.choice(MAKERS)
    return make(draw, kind), TYPES[kind]


def hostile_url(number: int) -> str:
    """Returns a URL of an image; of one in eight, the URL itself is damaged."""
    draw = Draw(number)
    data, media_type = hostile_image(number)
    text = base64.b64encode(data).decode()
    if draw.random() < 0.875:
        return f"data:{media_type};base64,{text}"
    return draw.choice(
        [
            f"data:{draw.choice(NAMES)};base64,{text}",
            f"data:{media_type};base64,{text[: draw.randrange(len(text) + 1)]}@",
            f"data:{media_type},{text}",
            f"data:{media_type};base64;base64,{text}\n\n",
            "data:",
            "http://169.254.169.254/latest",
            "file:///etc/passwd",
            "\ud800" if draw.random() < 0.1 else "javascript:1",
            "",
        ]
    )


def drawn(draw: Draw, kind: str) -> bytes:
    """Returns an image that can be read."""
    size = draw.choice(SIDES), draw.choice(SIDES)
    mode = draw.choice(MODES[kind])
    image = Image.effect_noise(size, draw.uniform(1, 99))
    image = image.convert("I").convert("I;16") if mode == "I;16" else image.convert(mode)
    options: dict[str, Any] = {}
    if kind == "GIF" and draw.random() < 0.3:
        options = {"save_all": True, "append_images": [image.rotate(90)] * 3}
    if kind in ("JPEG", "WEBP") and draw.random() < 0.5:
        exif = Image.Exif()
        exif[0x0112] = draw.choice((0, 1, 3, 6, 8, 9, 65535))
        options["exif"] = exif.tobytes()
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def truncated(draw: Draw, kind: str) -> bytes:
    data = drawn(draw, kind)
    return data[: draw.randrange(len(data) + 1)]


def with_changed_bytes(draw: Draw, kind: str) -> bytes:
    data = bytearray(drawn(draw, kind))
    for _ in range(draw.choice((1, 2, 8, 64))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def with_a_large_number(draw: Draw, kind: str) -> bytes:
    """Writes a size where one may stand: in the header, or behind a marker."""
    data = bytearray(drawn(draw, kind))
    marker = data.find(draw.choice(MARKERS))
    start = marker if marker >= 0 else 0
    at = min(start + draw.randrange(24), max(0, len(data) - 4))
    form = draw.choice((">I", "<I", ">H", "<H"))
    limit = 0xFFFFFFFF if form[1] == "I" else 0xFFFF
    value = min(draw.choice(LARGE), limit)
    data[at : at + struct.calcsize(form)] = struct.pack(form, value)
    return bytes(data)


def with_a_piece_moved(draw: Draw, kind: str) -> bytes:
    data = drawn(draw, kind)
    first, last = sorted((draw.randrange(len(data)), draw.randrange(len(data))))
    at = draw.randrange(len(data))
    return data[:at] + data[first:last] * draw.choice((1, 2, 50)) + data[at:]


def of_another_kind(draw: Draw, kind: str) -> bytes:
    return drawn(draw, draw.choice([*TYPES]))


def bomb(draw: Draw, kind: str) -> bytes:
    """Returns a PNG whose header says that it is large; its pixels may even be there."""
    width, height = draw.choice(
        ((20_000, 1), (1, 20_000), (16_000, 16_000), (65_535, 65_535), (7_200, 7_200), (0, 0))
    )
    row = b"\0" * (1 + width // 8 + 1)
    data = zlib.compress(row * min(height, 64), 9)
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(*each) for each in ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
    )


def large_text(draw: Draw, kind: str) -> bytes:
    """Returns a PNG with a compressed text of 10 MB."""
    text = zlib.compress(b" " * (10 << 20), 9)
    head = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"zTXt", b"k\0\0" + text), (b"IDAT", zlib.compress(b"\0\0")))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*each) for each in (*chunks, (b"IEND", b"")))


def no_image(draw: Draw, kind: str) -> bytes:
    svg = b"<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'/>"
    return draw.choice((b"", b"\0", svg, draw.randbytes(draw.randrange(400)), b"GIF89a", b"RIFF"))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


MAKERS: tuple[Callable[[Draw, str], bytes], ...] = (
    drawn,
    truncated,
    with_changed_bytes,
    with_changed_bytes,
    with_a_large_number,
    with_a_large_number,
    with_a_piece_moved,
    of_another_kind,
    bomb,
    large_text,
    no_image,
)
