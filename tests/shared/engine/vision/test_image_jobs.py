"""Vectors that no request waits for any more, or that are zeroed, are given to nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.engine.vision.image_encoder import ThreadedEncoder
from shared.engine.vision.image_jobs import ImageJobs, WantedImage
from shared.engine.vision.vector_cache import ImageKey, VectorCache
from shared.errors import DeviceFailed, StepFailed
from shared.pixels.pixel_fetcher import PixelRequest
from tests.support.waiting import until

SHAPE = (3, 3, 8, 8)
PIXELS = np.random.default_rng(1).integers(1, 256, SHAPE, dtype=np.uint8)
VECTORS = PIXELS.tobytes()  # of an encoder that changes nothing


class TileBytes:
    """`after_tile` is called with the number of tiles so far."""

    def __init__(self) -> None:
        self.num_tiles = 0
        self.after_tile: Callable[[int], None] = lambda _: None

    async def encode(self, tile: NDArray[np.uint8]) -> bytes:
        self.num_tiles += 1
        self.after_tile(self.num_tiles)
        return tile.tobytes()

    async def close(self) -> None: ...


class Jobs(ImageJobs):
    def __init__(self, **options) -> None:
        self.tiles, self.cache = TileBytes(), VectorCache(1 << 20)
        super().__init__(self.tiles, pixels, self.cache, lambda: 0.0, lambda: None, **options)

    async def vectors(self, wanted: WantedImage) -> bytes:
        self.want(wanted)
        await until(lambda: wanted.vectors is not None or wanted.error is not None)
        assert wanted.vectors is not None
        found = bytes(wanted.vectors)
        self.drop(wanted)
        return found


async def pixels(request: PixelRequest, deadline_s: float) -> memoryview:
    return PIXELS.copy().reshape(-1).data


def wanted_image(*, is_retained: bool) -> WantedImage:
    request = PixelRequest(
        gateway_id="g", tenant_id="a", request_id="r", image_hash=b"i", shape=SHAPE
    )
    return WantedImage(ImageKey("a", b"root", b"i"), request, is_retained=is_retained)


async def test_an_image_that_is_dropped_with_its_last_tile_is_not_kept() -> None:
    jobs, first = Jobs(), wanted_image(is_retained=False)
    jobs.tiles.after_tile = lambda count: jobs.drop(first) if count == len(PIXELS) else None
    jobs.want(first)
    await until(lambda: not jobs._jobs)
    assert (jobs.tiles.num_tiles, jobs.cache.num_bytes) == (len(PIXELS), 0)
    assert await jobs.vectors(wanted_image(is_retained=False)) == VECTORS
    await jobs.close()


async def test_an_image_that_is_dropped_as_its_vectors_come_is_not_kept() -> None:
    sent = bytearray(VECTORS)

    async def fetch_vectors(wanted: WantedImage) -> bytearray:
        if wanted is first:
            asyncio.get_running_loop().call_soon(jobs.drop, first)
            return sent
        return bytearray(VECTORS)

    jobs, first = Jobs(fetch_vectors=fetch_vectors), wanted_image(is_retained=False)
    jobs.want(first)
    await until(lambda: not jobs._jobs)
    assert (jobs.cache.num_bytes, any(sent)) == (0, False)
    assert await jobs.vectors(wanted_image(is_retained=True)) == VECTORS
    await jobs.close()


async def test_zeroed_vectors_leave_the_cache() -> None:
    """A tenant gets zero retention before its worker is told to drop what it has cached."""
    jobs = Jobs()
    for is_retained in (True, False, False):
        assert await jobs.vectors(wanted_image(is_retained=is_retained)) == VECTORS
    assert jobs.cache.num_bytes == 0
    await jobs.close()


@pytest.mark.parametrize("is_retained", [False, True])
async def test_vectors_of_two_jobs_for_one_image_are_one(is_retained: bool) -> None:
    """A worker fetches an image that another worker asks it to encode meanwhile."""
    sent, may_end = bytearray(VECTORS), asyncio.Event()

    async def fetch_vectors(wanted: WantedImage) -> bytearray:
        await may_end.wait()
        return sent

    jobs = Jobs(fetch_vectors=fetch_vectors)
    fetched, encoded = (wanted_image(is_retained=is_retained) for _ in range(2))
    encoded.is_encoded_here = True
    for each in (fetched, encoded):
        jobs.want(each)
    await until(lambda: encoded.vectors is not None)
    may_end.set()
    await until(lambda: fetched.vectors is not None)
    assert fetched.vectors is encoded.vectors
    assert bytes(encoded.vectors or b"") == VECTORS
    assert not any(sent)
    kept = encoded.vectors
    for each in (fetched, encoded):
        jobs.drop(each)
    assert kept == (VECTORS if is_retained else bytes(len(VECTORS)))
    assert jobs.cache.num_bytes == len(VECTORS) * is_retained
    await jobs.close()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_lost_device_is_told_from_a_tile_that_fails(is_lost: bool) -> None:
    """After an error of a kernel CUDA refuses all calls of the process."""

    def fail(*_: object) -> bytes:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def work(*_: object) -> None: ...

    jobs, wanted, reasons = Jobs(), wanted_image(is_retained=True), list[str]()
    failing = SimpleNamespace(config=None, vector_bytes=0, init_thread=work, encode_tile=fail)
    failing.check = fail if is_lost else work
    jobs._encoder = ThreadedEncoder(failing)
    jobs.on_device_lost(reasons.append)
    jobs.want(wanted)
    await until(lambda: not jobs._jobs)
    assert type(wanted.error) is (DeviceFailed if is_lost else StepFailed)
    assert ["illegal memory access" in each for each in reasons] == [True] * is_lost
    await jobs.close()
