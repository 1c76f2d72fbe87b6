"""Turns images of clients into what a model's encoder takes: decode, resize, cut, hash."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from services.gateway.images.config import ImageConfig
from services.gateway.images.decoding import decoded, naming
from services.gateway.images.families.processor import Grid, Processor
from services.gateway.images.input_image import ImageContext, InputImage

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """`pixels`: uint8, [tiles, 3, H, W]."""

    pixels: bytearray
    grid: Grid
    image_hash: bytes


def processed(
    images: Sequence[InputImage],
    config: ImageConfig,
    processor: Processor,
    context: ImageContext,
    check_tokens: Callable[[int], None],
) -> Iterator[ProcessedImage]:
    """Yields the images. `check_tokens`: is called with the number of image tokens so far; what it
    raises is raised. Raises InvalidRequest, which names the image.
    """
    num_tokens = 0
    for image in images:
        opened = decoded(image, max_pixels=context.max_pixels)
        grid = processor.grid_of(*opened.size, image.detail)
        num_tokens += config.num_tokens(grid)
        check_tokens(num_tokens)
        with naming(image.place):  # colours and transparency are of the file, too
            pixels = processor.pixels_of(opened, image.detail)
        # tiles of one row or column may be a view, or keep the order of the image's channels
        pixels = np.ascontiguousarray(pixels)
        found = image_hash(pixels, grid, config, context.revision)
        yield ProcessedImage(bytearray(pixels.data), grid, found)


def image_hash(
    pixels: npt.NDArray[np.uint8], grid: Grid, config: ImageConfig, revision: str
) -> bytes:
    """Returns the identity of an image for a model: equal for equal pixels in an equal grid, of one
    configuration of the processor and of the same weights.
    """
    digest = blake2b(digest_size=HASH_BYTES, person=b"hearth-image")
    sides = b"".join(each.to_bytes(2, "little") for each in grid)
    for field in (config.digest, revision.encode(), sides):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    digest.update(pixels.data)
    return digest.digest()
