"""Encodes the images that sequences wait for: one job for each image of a tenant.

    wanted ──cached──▶ ready
       ├──▶ another worker encodes it: fetch its vectors ──▶ ready, and cached
       │        └── there is none, or it fails
       └──▶ fetch pixels ──▶ encode its tiles, one of each tenant in turn ──▶ ready, and cached
                └── the request has ended: the pixels are fetched for the next one that waits

A job whose waiters have all left ends before its next tile. Vectors stay as long as a request uses
them, and in the cache unless nothing of the tenant may be retained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from shared.background import Background, item_error, start_awaited
from shared.engine.model_config.vision_config import Grid
from shared.engine.vision.image_encoder import ImageEncoder
from shared.engine.vision.image_room import ImageRoom
from shared.engine.vision.vector_cache import ImageKey, VectorCache
from shared.errors import DeviceFailed, HearthError, StepFailed
from shared.kv_wire.push_link import TenantTurns
from shared.messages import WorkerLoad
from shared.pixels.pixel_fetcher import PixelRequest

log = structlog.get_logger(__name__)

# Images whose pixels are fetched, or encoded, at a time
MAX_FETCHED, MAX_FETCHED_OF_TENANT = 8, 2
FETCH_S = 20.0

# Returns writable pixels in memory that nothing else uses.
Fetch = Callable[[PixelRequest, float], Awaitable[memoryview]]


@dataclass(slots=True, eq=False)
class WantedImage:
    """One request's claim to an image. Exactly one of `vectors` and `error` is set at its end. One
    that `is_encoded_here` is another worker's, or no other worker encodes it.
    """

    key: ImageKey
    pixels: PixelRequest
    is_retained: bool  # False: nothing of it may stay after the request
    is_encoded_here: bool = False
    grid: Grid = (0, 0)
    vectors: bytearray | None = None
    error: HearthError | None = None


# Returns the vectors from another worker, or None: the image is to be encoded here.
FetchVectors = Callable[[WantedImage], Awaitable[bytearray | None]]
_JobKey = tuple[ImageKey, bool]  # whether it is encoded here: that job never waits for others


@dataclass(slots=True)
class _SharedVectors:
    """`num` claims use the vectors. `is_retained`: none of them has said otherwise."""

    vectors: bytearray
    num: int = 0
    is_retained: bool = True


@dataclass(slots=True)
class ImageCounts:
    """Counts since the start."""

    num_encoded: int = 0  # images
    num_tiles: int = 0
    num_fetched: int = 0  # images that another worker has encoded
    num_reused: int = 0  # images that were wanted while they were encoded, or after
    busy_s: float = 0.0  # time with a tile in the encoder

    def add_to(self, load: WorkerLoad) -> WorkerLoad:
        return msgspec.structs.replace(
            load,
            num_encoded_images=self.num_encoded,
            num_fetched_images=self.num_fetched,
            num_reused_images=self.num_reused,
            num_encoded_tiles=self.num_tiles,
            encode_s=self.busy_s,
        )


@dataclass(slots=True)
class _Job:
    waiting: list[WantedImage] = field(default_factory=list)
    fetching: asyncio.Task[bytearray | None] | None = None  # from another worker


class ImageJobs:
    def __init__(
        self,
        encoder: ImageEncoder,
        fetch: Fetch,
        cache: VectorCache,
        now: Callable[[], float],
        on_ready: Callable[[], None],
        fetch_vectors: FetchVectors | None = None,
        unretained: Container[str] = (),
    ) -> None:
        """`fetch(request, deadline_s)` returns pixels; `on_ready` is called when an image is ready
        or has failed; `now` is in seconds. Without `fetch_vectors` all images are encoded here.
        Nothing is retained of the tenants in `unretained`.
        """
        self._unretained = unretained
        self._encoder = encoder
        self._fetch = fetch
        self._cache = cache
        self._now = now
        self._fetch_vectors = fetch_vectors
        self._on_ready = [on_ready]
        self._on_device_lost: Callable[[str], None] = lambda reason: None
        self._jobs: dict[_JobKey, _Job] = {}
        self._users: dict[ImageKey, _SharedVectors] = {}
        self._room = ImageRoom(MAX_FETCHED, MAX_FETCHED_OF_TENANT)
        self._turns = TenantTurns()
        self._background = Background()
        self.counts = ImageCounts()
        self.is_encoding = False  # a tile is in the encoder

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Calls `on_ready`, too, when an image is ready or has failed."""
        self._on_ready.append(on_ready)

    def on_device_lost(self, handler: Callable[[str], None]) -> None:
        """Calls `handler` with the reason when the encoder's device computes no more tiles."""
        self._on_device_lost = handler

    def want(self, wanted: WantedImage) -> None:
        """Sets the image's vectors, now or later. `drop` ends the claim."""
        wanted.is_retained &= wanted.key.tenant_id not in self._unretained
        if self._fetch_vectors is None:
            wanted.is_encoded_here = True
        self.counts.num_reused += self._give_known(wanted) or _job_key(wanted) in self._jobs
        if wanted.vectors is None:
            self._join(wanted)

    def drop(self, wanted: WantedImage) -> None:
        """Ends a claim. The last user of an image that is not retained zeroes it, also one that an
        earlier request has left in the cache.
        """
        job = self._jobs.get(_job_key(wanted))
        if job is not None and wanted in job.waiting:
            job.waiting.remove(wanted)
            if not job.waiting and job.fetching is not None:
                job.fetching.cancel()
        if wanted.vectors is None:
            return
        users = self._users[wanted.key]
        users.num -= 1
        if users.num == 0:
            del self._users[wanted.key]
            if not users.is_retained:
                self._cache.drop(wanted.key)
                _zero(users.vectors)
        wanted.vectors = None

    def drop_tenant(self, tenant_id: str) -> None:
        """Forgets and zeroes cached images of a tenant. Those that requests use, or wait for, are
        zeroed with the last claim.
        """
        for key, vectors in self._cache.drop_tenant(tenant_id):
            if key not in self._users:
                _zero(vectors)
        for key, users in self._users.items():
            users.is_retained &= key.tenant_id != tenant_id
        for (key, _), job in self._jobs.items():
            for each in job.waiting:
                each.is_retained &= key.tenant_id != tenant_id

    def clear_cache(self) -> None:
        self._cache.clear()

    async def close(self) -> None:
        await self._background.stop()
        await self._encoder.close()

    def _give_known(self, wanted: WantedImage) -> bool:
        vectors = self._known(wanted.key)
        if vectors is not None:
            self._give(wanted, vectors)
        return vectors is not None

    def _known(self, image: ImageKey) -> bytearray | None:
        found = self._users.get(image)
        return self._cache.get(image) if found is None else found.vectors

    def _first(self, image: ImageKey, vectors: bytearray) -> bytearray:
        """Returns the image's vectors: if another job was first, its own, and zeroes these."""
        known = self._known(image)
        if known is None:
            return vectors
        _zero(vectors)
        return known

    def _join(self, wanted: WantedImage) -> None:
        key = _job_key(wanted)
        job = self._jobs.get(key)
        if job is not None:
            job.waiting.append(wanted)
            return
        job = self._jobs[key] = _Job([wanted])
        self._background.start_item(self._run(key, job), lambda _: None)

    async def _run(self, key: _JobKey, job: _Job) -> None:
        try:
            async with self._room.place(key[0].tenant_id):
                while job.waiting:
                    await self._serve(key, job)
        finally:
            del self._jobs[key]

    async def _serve(self, key: _JobKey, job: _Job) -> None:
        """Gets the vectors for all waiters with the pixels of the first one's request."""
        first, (image, is_encoded_here) = job.waiting[0], key
        if is_encoded_here:
            vectors = await self._of_pixels(first, job)
        else:
            vectors = await self._of_other_worker(first, job)
            if vectors is None and first in job.waiting:
                self._encode_here(job)
        if vectors is None:  # failed, or left to another job, or nobody waits any more
            return
        if not job.waiting:  # they have left meanwhile
            _zero(vectors)
            return
        vectors = self._first(image, vectors)
        if all(each.is_retained for each in job.waiting):
            self._cache.put(image, vectors)
        for each in job.waiting:
            self._give(each, vectors)
        job.waiting.clear()
        self._notify()

    def _encode_here(self, job: _Job) -> None:
        """Leaves all waiters to the job that encodes the image here, for other workers, too."""
        for each in job.waiting:
            each.is_encoded_here = True
            if not self._give_known(each):
                self._join(each)
        job.waiting.clear()
        self._notify()

    async def _of_other_worker(self, first: WantedImage, job: _Job) -> bytearray | None:
        """Returns None if no other worker encodes the image, or nobody waits any more."""
        assert self._fetch_vectors is not None, "else it is encoded here"
        job.fetching = start_awaited(self._fetch_vectors(first))
        try:
            await asyncio.wait((job.fetching,))
            vectors = None if job.fetching.cancelled() else job.fetching.result()
        except BaseException as raised:
            log.warning("vectors_not_fetched", exc_info=item_error(raised))
            return None
        finally:
            job.fetching.cancel()
            job.fetching = None
        self.counts.num_fetched += vectors is not None
        return vectors

    async def _of_pixels(self, first: WantedImage, job: _Job) -> bytearray | None:
        """Encodes the image here. Returns None if that fails, as those know that it fails."""
        try:
            fetched = await self._fetch(first.pixels, FETCH_S)
        except HearthError as error:
            log.info("pixels_not_fetched", reason=error.message)
            self._fail(job, [first], error)
            return None
        pixels = np.frombuffer(fetched, dtype=np.uint8).reshape(first.pixels.shape)
        try:
            vectors = await self._encoded(pixels, first.pixels.tenant_id, job)
        except BaseException as raised:
            reason = item_error(raised)
            log.warning("image_not_encoded", exc_info=reason)
            failed = reason if isinstance(reason, HearthError) else StepFailed(str(reason))
            self._fail(job, list(job.waiting), failed)
            if isinstance(failed, DeviceFailed):
                self._on_device_lost(failed.message)
            return None
        finally:
            if not first.is_retained:
                pixels.fill(0)
        if vectors is not None:
            self.counts.num_encoded += 1
        return vectors

    async def _encoded(
        self, tiles: NDArray[np.uint8], tenant_id: str, job: _Job
    ) -> bytearray | None:
        """Returns the vectors of all tiles, or None if no one waits for them any more."""
        vectors = bytearray()
        for tile in tiles:
            async with self._turns.turn(tenant_id):
                if not job.waiting:
                    _zero(vectors)
                    return None
                vectors += await self._encoded_tile(tile)
        return vectors

    async def _encoded_tile(self, tile: NDArray[np.uint8]) -> bytes:
        began_at, self.is_encoding = self._now(), True
        try:
            vectors = await self._encoder.encode(tile)
        finally:
            self.is_encoding = False
        self.counts.num_tiles += 1
        self.counts.busy_s += self._now() - began_at
        return vectors

    def _give(self, wanted: WantedImage, vectors: bytearray) -> None:
        users = self._users.setdefault(wanted.key, _SharedVectors(vectors))
        users.num += 1
        users.is_retained &= wanted.is_retained
        wanted.vectors = vectors

    def _fail(self, job: _Job, failed: list[WantedImage], error: HearthError) -> None:
        for each in failed:
            each.error = error
            if each in job.waiting:
                job.waiting.remove(each)
        self._notify()

    def _notify(self) -> None:
        for on_ready in self._on_ready:
            on_ready()


def _job_key(wanted: WantedImage) -> _JobKey:
    return wanted.key, wanted.is_encoded_here


def _zero(vectors: bytearray) -> None:
    vectors[:] = bytes(len(vectors))
