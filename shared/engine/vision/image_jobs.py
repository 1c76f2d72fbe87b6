"""Encodes the images that sequences wait for: one job for each image of a tenant.

    wanted ──cached──▶ ready
       └──▶ fetch pixels ──▶ encode its tiles, one of each tenant in turn ──▶ ready, and cached
                └── the request has ended: the pixels are fetched for the next one that waits

A job whose waiters have all left ends before its next tile. Vectors stay as long as a request uses
them, and in the cache unless nothing of the tenant may be retained.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
import structlog
from numpy.typing import NDArray

from shared.background import Background, item_error
from shared.engine.vision.image_encoder import ImageEncoder
from shared.engine.vision.image_room import ImageRoom
from shared.engine.vision.vector_cache import ImageKey, VectorCache
from shared.errors import HearthError, StepFailed
from shared.kv_wire.push_link import TenantTurns
from shared.pixels.pixel_fetcher import PixelRequest

log = structlog.get_logger(__name__)

# Images whose pixels are fetched, or encoded, at a time
MAX_FETCHED, MAX_FETCHED_OF_TENANT = 8, 2
FETCH_S = 20.0

# Returns writable pixels in memory that nothing else uses.
Fetch = Callable[[PixelRequest, float], Awaitable[memoryview]]


@dataclass(slots=True, eq=False)
class WantedImage:
    """One request's claim to an image. Exactly one of `vectors` and `error` is set at its end."""

    key: ImageKey
    pixels: PixelRequest
    is_retained: bool  # False: nothing of it may stay after the request
    vectors: bytearray | None = None
    error: HearthError | None = None


@dataclass(slots=True)
class _Users:
    vectors: bytearray
    num: int = 0


@dataclass(slots=True)
class ImageCounts:
    """Counts since the start."""

    num_encoded: int = 0  # images
    num_tiles: int = 0
    num_reused: int = 0  # images that were wanted while they were encoded, or after
    busy_s: float = 0.0  # time with a tile in the encoder


@dataclass(slots=True)
class _Job:
    waiting: list[WantedImage] = field(default_factory=list)


class ImageJobs:
    def __init__(
        self,
        encoder: ImageEncoder,
        fetch: Fetch,
        cache: VectorCache,
        now: Callable[[], float],
        on_ready: Callable[[], None],
    ) -> None:
        """`fetch(request, deadline_s)` returns pixels; `on_ready` is called when an image is ready
        or has failed; `now` is in seconds.
        """
        self._encoder = encoder
        self._fetch = fetch
        self._cache = cache
        self._now = now
        self._on_ready = on_ready
        self._jobs: dict[ImageKey, _Job] = {}
        self._users: dict[ImageKey, _Users] = {}
        self._room = ImageRoom(MAX_FETCHED, MAX_FETCHED_OF_TENANT)
        self._turns = TenantTurns()
        self._background = Background()
        self.counts = ImageCounts()

    def want(self, wanted: WantedImage) -> None:
        """Sets the image's vectors, now or later. `drop` ends the claim."""
        found = self._users.get(wanted.key)
        vectors = self._cache.get(wanted.key) if found is None else found.vectors
        if vectors is not None:
            self.counts.num_reused += 1
            self._give(wanted, vectors)
            return
        job = self._jobs.get(wanted.key)
        if job is not None:
            self.counts.num_reused += 1
            job.waiting.append(wanted)
            return
        job = self._jobs[wanted.key] = _Job([wanted])
        self._background.start_item(self._run(wanted.key, job), lambda _: None)

    def drop(self, wanted: WantedImage) -> None:
        """Ends a claim. The last user of an image that is not retained zeroes it."""
        job = self._jobs.get(wanted.key)
        if job is not None and wanted in job.waiting:
            job.waiting.remove(wanted)
        if wanted.vectors is None:
            return
        users = self._users[wanted.key]
        users.num -= 1
        if users.num == 0:
            del self._users[wanted.key]
            if not wanted.is_retained:
                _zero(users.vectors)
        wanted.vectors = None

    def drop_tenant(self, tenant_id: str) -> None:
        """Forgets and zeroes cached images of a tenant. Those that requests use are only
        forgotten.
        """
        for key, vectors in self._cache.drop_tenant(tenant_id):
            if key not in self._users:
                _zero(vectors)

    def clear_cache(self) -> None:
        self._cache.clear()

    async def close(self) -> None:
        await self._background.stop()
        await self._encoder.close()

    async def _run(self, key: ImageKey, job: _Job) -> None:
        try:
            async with self._room.place(key.tenant_id):
                while job.waiting:
                    await self._serve(key, job)
        finally:
            del self._jobs[key]

    async def _serve(self, key: ImageKey, job: _Job) -> None:
        """Encodes the image for all waiters with the pixels of the first one's request."""
        first = job.waiting[0]
        try:
            fetched = await self._fetch(first.pixels, FETCH_S)
        except HearthError as error:
            log.info("pixels_not_fetched", reason=error.message)
            self._fail(job, [first], error)
            return
        pixels = np.frombuffer(fetched, dtype=np.uint8).reshape(first.pixels.shape)
        try:
            vectors = await self._encoded(pixels, first.pixels.tenant_id, job)
        except BaseException as raised:
            reason = item_error(raised)
            log.warning("image_not_encoded", exc_info=reason)
            failed = reason if isinstance(reason, HearthError) else StepFailed(str(reason))
            self._fail(job, list(job.waiting), failed)
            return
        finally:
            if not first.is_retained:
                pixels.fill(0)
        if vectors is None:  # nobody waits any more
            return
        self.counts.num_encoded += 1
        if all(each.is_retained for each in job.waiting):
            self._cache.put(key, vectors)
        for each in job.waiting:
            self._give(each, vectors)
        job.waiting.clear()
        self._on_ready()

    async def _encoded(
        self, tiles: NDArray[np.uint8], tenant_id: str, job: _Job
    ) -> bytearray | None:
        """Returns the vectors of all tiles, or None if no one waits for them any more."""
        vectors = bytearray()
        for tile in tiles:
            async with self._turns.turn(tenant_id):
                if not job.waiting:
                    return None
                began_at = self._now()
                vectors += await self._encoder.encode(tile)
                self.counts.num_tiles += 1
                self.counts.busy_s += self._now() - began_at
        return vectors

    def _give(self, wanted: WantedImage, vectors: bytearray) -> None:
        self._users.setdefault(wanted.key, _Users(vectors)).num += 1
        wanted.vectors = vectors

    def _fail(self, job: _Job, failed: list[WantedImage], error: HearthError) -> None:
        for each in failed:
            each.error = error
            if each in job.waiting:
                job.waiting.remove(each)
        self._on_ready()


def _zero(vectors: bytearray) -> None:
    vectors[:] = bytes(len(vectors))
