"""The rows of a PNG that are decoded by bands are those of Pillow, and others are left to it."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO

import pytest
from PIL import Image

from services.gateway.images.decoding import decoded, naming
from services.gateway.images.input_image import InputImage
from services.gateway.images.png_rows import PIXEL_BYTES, PngRows, png_rows
from services.gateway.images.resizing import in_rgb, resized
from shared.errors import InvalidRequest

NUM_DAMAGED = 50
COLOURS = {"L": 0, "RGB": 2, "LA": 4, "RGBA": 6}
SIZE = (23, 150)  # of more rows than a band of `resized` has
RED_IS_TRANSPARENT = (b"tRNS", struct.pack(">HHH", 200, 30, 90))
TURNED = (b"eXIf", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0")


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def filtered_rows(draw: random.Random, mode: str) -> bytes:
    """Returns rows of any filters; whatever their bytes are, they stand for some pixels."""
    row_bytes = SIZE[0] * PIXEL_BYTES[mode]
    return b"".join(
        bytes([draw.randrange(5)]) + draw.choice((draw.randbytes(row_bytes), bytes(row_bytes)))
        for _ in range(SIZE[1])
    )


def png(
    mode: str,
    rows: bytes,
    *,
    before: tuple[tuple[bytes, bytes], ...] = (),
    after: tuple[tuple[bytes, bytes], ...] = (),
    bits: int = 8,
    interlaced: int = 0,
) -> bytes:
    """Returns a file with its pixels in several chunks, of which one is empty."""
    head = struct.pack(">IIBBBBB", *SIZE, bits, COLOURS[mode], 0, 0, interlaced)
    data = zlib.compress(rows)
    parts = [b"", data[:1], data[1:700], data[700:]]
    chunks = [(b"IHDR", head), *before, *((b"IDAT", each) for each in parts), *after]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in [*chunks, (b"IEND", b"")])


def rows_of(data: bytes) -> PngRows | None:
    return png_rows(Image.open(BytesIO(data)), data)


@pytest.mark.parametrize("num_rows", [1, 7, 64, 150, 999])
@pytest.mark.parametrize("mode", PIXEL_BYTES)
def test_bands_are_the_rows_of_pillow(mode: str, num_rows: int) -> None:
    before = (RED_IS_TRANSPARENT,) if mode == "RGB" else ()
    data = png(mode, filtered_rows(random.Random(num_rows), mode), before=before)
    expected, rows = Image.open(BytesIO(data)), rows_of(data)
    assert rows is not None
    bands = [*rows.bands(num_rows)]
    assert {each.mode for each in bands} == {expected.mode}
    assert sum(each.height for each in bands) == SIZE[1] == expected.height
    assert b"".join(each.tobytes() for each in bands) == expected.tobytes()


@pytest.mark.parametrize("size", [SIZE, (40, 41), (5, 300), (3, 20), (13, 130), (13, 129)])
@pytest.mark.parametrize(
    ("mode", "before"), [("RGB", (RED_IS_TRANSPARENT,)), ("RGBA", ()), ("LA", ())]
)
def test_resized_pixels_are_the_same(
    mode: str, before: tuple[tuple[bytes, bytes], ...], size: tuple[int, int]
) -> None:
    rows = filtered_rows(random.Random(1), mode)
    if mode == "RGB":
        rows = b"\0" + b"\xc8\x1e\x5a" * SIZE[0] + rows[1 + 3 * SIZE[0] :]
    data = png(mode, rows, before=before)
    found = rows_of(data)
    assert found is not None
    for resample in (Image.Resampling.LANCZOS, Image.Resampling.BILINEAR):
        expected = in_rgb(Image.open(BytesIO(data))).resize(size, resample)
        assert resized(found, size, resample).tobytes() == expected.tobytes()


def test_other_files_are_left_to_pillow() -> None:
    rows = filtered_rows(random.Random(1), "RGBA")
    assert rows_of(png("RGBA", rows, after=((b"tEXt", b"a\0b"),))) is not None
    left = {
        "turned": png("RGBA", rows, before=(TURNED,)),
        "turned by what follows": png("RGBA", rows, after=(TURNED,)),
        "of 16 bits": png("RGBA", rows, bits=16),
        "interlaced": png("RGBA", rows, interlaced=1),
        "grey": png("L", rows),
        "opaque": png("RGB", rows),
        "pixels in two places": png("RGBA", rows, after=((b"tEXt", b"a\0b"), (b"IDAT", b""))),
        "no end": png("RGBA", rows)[:-12],
        "half an end": png("RGBA", rows)[:-4],
    }
    assert [name for name, data in left.items() if rows_of(data) is not None] == []
    for kind, mode in (("JPEG", "RGB"), ("PNG", "RGBA")):
        buffer, frame = BytesIO(), Image.new(mode, SIZE)
        options = {"save_all": True, "append_images": [Image.new(mode, SIZE, "red")]}
        frame.save(buffer, kind, **(options if kind == "PNG" else {}))
        assert rows_of(buffer.getvalue()) is None, kind


@pytest.mark.parametrize("damage", ["truncated", "no data", "a filter", "a block"])
def test_broken_pixels_are_an_error(damage: str) -> None:
    rows = bytearray(filtered_rows(random.Random(1), "RGBA"))
    match damage:
        case "truncated":
            data = png("RGBA", bytes(rows[:-1]))
        case "no data":
            data = png("RGBA", b"")
        case "a filter":
            rows[-1 - 4 * SIZE[0]] = 5
            data = png("RGBA", bytes(rows))
        case _:
            data = png("RGBA", bytes(rows))
            middle = data.index(b"IDAT", 100) + 40
            data = data[:middle] + bytes(8) + data[middle + 8 :]
    found = rows_of(data)
    assert found is not None
    with pytest.raises((OSError, ValueError)):
        _ = [*found.bands(64)]


def pixels_of(image: Callable[[], Image.Image | PngRows | None]) -> bytes | None:
    """Returns the pixels of an image, or None if it cannot be decoded."""
    with suppress(InvalidRequest), naming("image"):
        found = image()
        if isinstance(found, PngRows):
            return b"".join(each.tobytes() for each in found.bands(64))
        return None if found is None else found.tobytes()
    return None


def test_damaged_files_have_the_pixels_of_pillow_or_none() -> None:
    rows, num_read = filtered_rows(random.Random(1), "RGBA"), 0
    for seed in range(NUM_DAMAGED):
        draw, damaged = random.Random(seed), bytearray(rows)
        damaged[draw.randrange(len(rows))] = draw.randrange(256)
        data = bytearray(png("RGBA", damaged))
        if draw.random() < 0.5:
            data[draw.randrange(33, len(data))] = draw.randrange(256)
        found = pixels_of(lambda: rows_of(bytes(data)))  # noqa: B023
        if found is not None:
            assert found == pixels_of(lambda: Image.open(BytesIO(data))), seed  # noqa: B023
            num_read += 1
    assert 0 < num_read < NUM_DAMAGED


def test_large_pngs_are_decoded_by_their_rows() -> None:
    for side, kind in ((1900, Image.Image), (2100, PngRows)):
        buffer = BytesIO()
        Image.new("RGBA", (side, side)).save(buffer, "PNG", compress_level=1)
        image = InputImage("image", buffer.getvalue(), is_decoded=True)
        assert isinstance(decoded(image, max_pixels=5_000_000), kind)
