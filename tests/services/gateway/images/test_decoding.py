"""Images of clients are decoded upright, on white, within limits; others are named."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from services.gateway.images.decoding import decoded, webp_size
from services.gateway.images.input_image import (
    InputImage,
    image_of_base64,
    image_of_numbers,
    image_of_url,
)
from services.gateway.images.resizing import in_rgb, resized
from shared.errors import InvalidRequest

PLACE = "messages[0].content[1]"
LIMIT = 1_000_000
FORMATS = ["JPEG", "PNG", "WEBP", "GIF"]


def encoded(
    kind: str, size: tuple[int, int] = (20, 10), mode: str = "RGB", **more: object
) -> bytes:
    image = Image.new(mode, size, 200 if mode == "L" else (200, 30, 90, 120)[: len(mode)])
    buffer = BytesIO()
    image.save(buffer, kind, **more)  # type: ignore[arg-type]
    return buffer.getvalue()


def noise(mode: str) -> Image.Image:
    rng = np.random.default_rng(4)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 1 << 16, (150, 90), np.uint16))
    return Image.frombytes(
        mode, (90, 150), rng.bytes(90 * 150 * len(Image.new(mode, (1, 1)).getbands()))
    )


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is large, and has next to no data."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def read(data: bytes, media_type: str = "") -> Image.Image:
    return in_rgb(decoded(InputImage(PLACE, data, media_type, is_decoded=True), max_pixels=LIMIT))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (20, 10)])
def test_formats_are_read(kind: str, size: tuple[int, int]) -> None:
    image = read(encoded(kind, size), f"image/{kind.lower()}")
    assert (image.mode, image.size) == ("RGB", size)
    assert np.abs(np.asarray(image)[0, 0].astype(int) - (200, 30, 90)).max() <= 24


def test_cmyk_and_the_first_frame_of_an_animation_are_read() -> None:
    buffer = BytesIO()
    Image.new("CMYK", (8, 8)).save(buffer, "JPEG")
    assert read(buffer.getvalue()).getpixel((3, 3)) == (255, 255, 255)
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    buffer = BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    assert read(buffer.getvalue()).getpixel((0, 0)) == (255, 0, 0)


def test_exif_turns_the_image_and_bad_exif_does_not() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGB", (20, 10))
    buffer = BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    assert read(buffer.getvalue()).size == (10, 20)
    buffer = BytesIO()
    image.save(buffer, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert read(buffer.getvalue()).size == (20, 10)


def transparent_png(size: tuple[int, int]) -> bytes:
    buffer = BytesIO()
    Image.new("P", size, 3).save(buffer, "PNG", transparency=3)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "image",
    [
        *(noise(mode) for mode in ("RGB", "RGBA", "L", "LA", "CMYK", "I;16")),
        noise("RGB").quantize(7),
        Image.open(BytesIO(transparent_png((90, 150)))),
    ],
    ids=["RGB", "RGBA", "L", "LA", "CMYK", "I;16", "P", "transparent P"],
)
@pytest.mark.parametrize(
    "size", [(33, 64), (200, 400), (90, 20), (7, 150), (90, 150), (70, 110), (70, 109), (120, 149)]
)
def test_pixels_are_those_of_a_copy_in_rgb(image: Image.Image, size: tuple[int, int]) -> None:
    """Of more rows and columns than a band has, in both orders of Pillow's passes."""
    for resample in (Image.Resampling.LANCZOS, Image.Resampling.BILINEAR):
        expected = in_rgb(image).resize(size, resample)
        assert resized(image, size, resample).tobytes() == expected.tobytes()


def test_transparent_pixels_are_on_white() -> None:
    buffer = BytesIO()
    Image.new("RGBA", (4, 3000), (0, 0, 0, 0)).save(buffer, "PNG")  # more rows than one band has
    image = read(buffer.getvalue())
    assert image.size == (4, 3000) and image.getextrema() == ((255, 255),) * 3


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "no bytes": (lambda: b"", "no bytes"),
    "truncated": (lambda: encoded("PNG", (60, 60))[:-30], "cannot be decoded|not a complete"),
    "header alone": (lambda: encoded("JPEG")[:30], "cannot be decoded|not a complete"),
    "long and thin": (lambda: png_header(20_000, 1), "a side of 20000"),
    "bomb": (lambda: png_header(10_000, 10_000), "are more than"),
    "webp bomb": (
        lambda: b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\x3f\0" * 2 + b"\0" * 9,
        "are more than",
    ),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a complete image"),
    "tiff": (lambda: encoded("TIFF"), "not a complete image"),
    "text": (lambda: b"a text", "not a complete image"),
    "zero size": (lambda: png_header(0, 5), "cannot|no pixels|not a complete"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_image_is_named(name: str) -> None:
    make, reason = HOSTILE[name]
    with pytest.raises(InvalidRequest, match=reason) as caught:
        read(make())
    assert caught.value.param == PLACE and caught.value.message.startswith(PLACE)


def test_another_type_than_declared_is_named() -> None:
    with pytest.raises(InvalidRequest, match="the image is image/png, and not image/jpeg"):
        read(encoded("PNG"), "image/jpeg")


@pytest.mark.parametrize("lossless", [True, False])
def test_webp_headers(lossless: bool) -> None:
    assert webp_size(encoded("WEBP", (300, 7), lossless=lossless)) == (300, 7)
    assert webp_size(encoded("WEBP", (300, 7), "RGBA", lossless=lossless, exif=b"Exif\0\0")) == (
        300,
        7,
    )
    assert webp_size(encoded("PNG")) is None


def test_data_urls() -> None:
    text = base64.b64encode(b"abc").decode()
    found = image_of_url(PLACE, f"data:image/JPG;base64,{text}", "low")
    assert (found.content, found.media_type, found.detail) == (b"abc", "image/jpeg", "low")
    assert image_of_url(PLACE, f"data:;base64,{text}").media_type == ""
    assert image_of_base64(PLACE, text[:2] + "\n" + text[2:]).content == b"abc"
    assert image_of_numbers(PLACE, [1, 2]).content == b"\1\2"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "must be a data URL"),
        ("data:image/png,abc", "must be in base64"),
        ("data:image/svg+xml;base64,YQ==", "is not one of"),
        ("data:text/plain;base64,YQ==", "is not one of"),
        ("", "must be a data URL"),
    ],
)
def test_other_urls_are_named(url: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        image_of_url(PLACE, url)


@pytest.mark.parametrize("url", ["https://example.com/a.png", "HTTP://127.0.0.1/"])
def test_an_address_has_no_bytes_until_it_is_fetched(url: str) -> None:
    found = image_of_url(PLACE, url)
    assert found.address == url
    with pytest.raises(InvalidRequest, match="not fetched"):
        _ = found.content


@pytest.mark.parametrize("num_bytes", [0, 1, 49_151, 49_152, 49_153, 200_000])
def test_base64_of_several_pieces(num_bytes: int) -> None:
    data = np.random.default_rng(1).bytes(num_bytes)
    text = base64.encodebytes(data).decode()  # in lines
    assert image_of_base64(PLACE, text).content == data


@pytest.mark.parametrize("text", ["!!!!", "YQ", "YQ==YQ==", "Ā", f"{'A' * 65_534}==YWJj"])
def test_junk_is_not_base64(text: str) -> None:
    with pytest.raises(InvalidRequest, match="not base64"):
        _ = image_of_base64(PLACE, text).content
