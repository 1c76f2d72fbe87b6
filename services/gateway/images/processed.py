"""Turns images of clients into what a model's encoder takes: decode, resize, cut, hash."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from services.gateway.images.config import ImageConfig
from services.gateway.images.decoding import decoded
from services.gateway.images.idefics3 import Grid, grid_of, num_tiles, tiles_of
from services.gateway.images.input_image import ImageContext, InputImage

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """`pixels`: uint8, [tiles, 3, tile_size, tile_size]."""

    pixels: bytearray
    grid: Grid
    image_hash: bytes


def processed(
    images: Sequence[InputImage],
    config: ImageConfig,
    context: ImageContext,
    check_tokens: Callable[[int], None],
) -> Iterator[ProcessedImage]:
    """Yields the images. `check_tokens`: is called with the number of image tokens so far; what it
    raises is raised. Raises InvalidRequest, which names the image.
    """
    num_tokens = 0
    for image in images:
        opened = decoded(image, max_pixels=context.max_pixels)
        grid = grid_of(*opened.size, config, image.detail)
        num_tokens += num_tiles(grid) * config.tokens_per_tile
        check_tokens(num_tokens)
        tiles = tiles_of(opened, config, image.detail)
        found = image_hash(tiles, grid, config, context.revision)
        yield ProcessedImage(bytearray(tiles.data), grid, found)


def image_hash(
    pixels: npt.NDArray[np.uint8], grid: Grid, config: ImageConfig, revision: str
) -> bytes:
    """Returns the identity of an image for a model: equal for equal pixels in an equal grid, of one
    configuration of the processor and of the same weights.
    """
    digest = blake2b(digest_size=HASH_BYTES, person=b"hearth-image")
    for field in (config.digest, revision.encode(), bytes(grid)):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    digest.update(pixels.data)
    return digest.digest()
