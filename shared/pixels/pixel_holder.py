"""The gateway's end of the pixel plane: holds the pixels of open requests, pushes them to workers.
Those of prefixes it reads from their files for each push.

An image is held once for all open requests of a tenant that have it. Memory is bounded: an image
that does not fit is rejected, and its request with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from shared.background import Background, item_error
from shared.errors import HearthError, InvalidRequest, LinkLost, Overloaded, PayloadTooLarge
from shared.kv_wire.link import KvDialer, PushLink
from shared.messages import Done, FetchPixels
from shared.pixels.pixel_frames import MAX_IMAGE_BYTES, byte_header, image_bytes
from shared.subjects import pixels
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)

MAX_HELD_BYTES = 1 << 30
MAX_PUSHES = 256  # at a time
RETRY_AFTER_S = 1.0

Regions = frozenset[str] | None  # that may hold pixels of a request; None: all
# Raises a HearthError if the worker of a fetch may not have pixels that are for these regions.
CheckFetch = Callable[[FetchPixels, Regions], None]


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image that is stored as a file; `read` returns its pixels."""

    regions: Regions
    read: Callable[[], Awaitable[bytearray]]


# Returns the stored image that a fetch names, or None: it names none. Raises HearthError.
FindStored = Callable[[FetchPixels], Awaitable[StoredImage | None]]


async def _nothing_stored(_: FetchPixels) -> StoredImage | None:
    return None


@dataclass(slots=True)
class HeldImage:
    pixels: bytearray
    shape: tuple[int, ...]
    is_zeroed_at_end: bool = False
    requests: dict[str, Regions] = field(default_factory=dict)


class PixelHolder:
    def __init__(
        self,
        bus: Bus,
        dialer: KvDialer,
        check_fetch: CheckFetch,
        *,
        max_bytes: int = MAX_HELD_BYTES,
        max_tenant_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        """`check_fetch` decides which workers may fetch what, besides the rules of this class: the
        request is open here, belongs to the tenant and has the image.
        """
        self._bus = bus
        self._dialer = dialer
        self._check_fetch = check_fetch
        self._find_stored: FindStored = _nothing_stored
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._of_tenant: Counter[str] = Counter()  # bytes
        self._images: dict[tuple[str, bytes], HeldImage] = {}
        self._of_request: dict[str, list[tuple[str, bytes]]] = {}
        self._pushes = Background()
        self.num_bytes = 0  # held now
        self.num_pushed_bytes = 0  # since the start
        self.num_fetches = 0

    def read_stored(self, find: FindStored) -> None:
        """Also serves the images that `find` returns."""
        self._find_stored = find

    async def start(self) -> None:
        await self._bus.serve(pixels(self._bus.process_id), FetchPixels, self._fetch)

    async def close(self) -> None:
        await self._pushes.stop()
        await self._dialer.close()

    def put(
        self,
        request_id: str,
        tenant_id: str,
        image_hash: bytes,
        pixels: bytearray,
        shape: tuple[int, ...],
        *,
        regions: Regions = None,
        is_zeroed_at_end: bool = False,
    ) -> None:
        """Holds an image, uint8 of `shape`, until `forget` of its last request; workers in
        `regions` may fetch it. The holder owns `pixels` from now on.

        With `is_zeroed_at_end` its memory is then zeroed. Raises Overloaded if all images would
        take more than the limit, PayloadTooLarge if those of this request alone would,
        InvalidRequest for one that is too large for any worker.
        """
        key = tenant_id, image_hash
        held = self._images.get(key)
        if held is None:
            self._check_request(request_id, len(pixels))
            held = self._hold(key, pixels, shape)
        elif is_zeroed_at_end:
            pixels[:] = bytes(len(pixels))  # those of an earlier request are held
        held.is_zeroed_at_end |= is_zeroed_at_end
        held.requests[request_id] = regions
        self._of_request.setdefault(request_id, []).append(key)

    def forget(self, request_id: str) -> None:
        """Releases the images of a request that has ended. Idempotent."""
        for key in self._of_request.pop(request_id, ()):
            held = self._images.get(key)
            if held is None:
                continue
            held.requests.pop(request_id, None)
            if not held.requests:
                self._release(key, held)

    def _check_request(self, request_id: str, num_bytes: int) -> None:
        """Raises PayloadTooLarge for a request that never fits, however often it is sent."""
        own = self._of_request.get(request_id, ())
        num_bytes += sum(len(self._images[each].pixels) for each in own)
        limit = min(self._max_bytes, self._max_tenant_bytes)
        if num_bytes > limit:
            raise PayloadTooLarge(
                f"the images of the request have more than {limit} bytes of pixels, the limit: "
                "send fewer, or some in low detail"
            )

    def _hold(self, key: tuple[str, bytes], pixels: bytearray, shape: tuple[int, ...]) -> HeldImage:
        num_bytes = len(pixels)
        if num_bytes != image_bytes(shape):
            raise ValueError(f"{num_bytes} bytes of pixels do not have the shape {shape}")
        if num_bytes > MAX_IMAGE_BYTES:
            raise InvalidRequest(
                f"an image has {num_bytes} bytes of pixels, more than {MAX_IMAGE_BYTES}"
            )
        if self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded(
                f"the gateway holds {self.num_bytes} bytes of images, its limit is "
                f"{self._max_bytes}",
                retry_after_s=RETRY_AFTER_S,
            )
        of_tenant = self._of_tenant[key[0]]
        if of_tenant + num_bytes > self._max_tenant_bytes:
            raise Overloaded(
                f"the open requests of this tenant hold {of_tenant} bytes of images, the limit is "
                f"{self._max_tenant_bytes}",
                retry_after_s=RETRY_AFTER_S,
            )
        held = self._images[key] = HeldImage(pixels, shape)
        self.num_bytes += num_bytes
        self._of_tenant[key[0]] += num_bytes
        return held

    def _release(self, key: tuple[str, bytes], held: HeldImage) -> None:
        del self._images[key]
        self.num_bytes -= len(held.pixels)
        self._of_tenant[key[0]] -= len(held.pixels)
        if not self._of_tenant[key[0]]:
            del self._of_tenant[key[0]]
        if held.is_zeroed_at_end:
            held.pixels[:] = bytes(len(held.pixels))

    async def _fetch(self, command: FetchPixels) -> Done:
        held = self._images.get((command.tenant_id, command.image_hash))
        if held is not None and command.request_id in held.requests:
            if held.shape != command.shape:
                raise InvalidRequest(
                    f"the image has the shape {held.shape}, not {command.shape}", param="shape"
                )
            self._check_fetch(command, held.requests[command.request_id])
            self._count_push()
            self._pushes.start_item(self._push(command, held), lambda _: None)
            return Done()
        stored = await self._find_stored(command)
        if stored is None:
            raise InvalidRequest("this gateway holds no such image", param="image_hash")
        self._check_fetch(command, stored.regions)
        self._count_push()
        self._pushes.start_item(self._push_stored(command, stored), lambda _: None)
        return Done()

    def _count_push(self) -> None:
        """Raises Overloaded."""
        if len(self._pushes) >= MAX_PUSHES:
            raise Overloaded("this gateway pushes too many images", retry_after_s=RETRY_AFTER_S)
        self.num_fetches += 1

    async def _push_stored(self, command: FetchPixels, stored: StoredImage) -> None:
        """Holds the image while it is pushed. A worker gets nothing of one that cannot be read."""
        push_id = f"push:{command.transfer_id.hex()}"
        try:
            with _logged(command):
                pixels = await stored.read()
                self.put(
                    push_id,
                    command.tenant_id,
                    command.image_hash,
                    pixels,
                    command.shape,
                    regions=stored.regions,
                )
                await self._push(command, self._images[command.tenant_id, command.image_hash])
        finally:
            self.forget(push_id)

    async def _push(self, command: FetchPixels, held: HeldImage) -> None:
        """Pushes the image until it is complete, forgotten or past the fetch's deadline, also to a
        worker that acknowledges nothing: it sees the end of each.
        """
        with _logged(command):
            async with asyncio.timeout(command.deadline_s):
                await self._send_parts(command, held)

    async def _send_parts(self, command: FetchPixels, held: HeldImage) -> None:
        key = command.tenant_id, command.image_hash
        link = await self._dialer.link(command.target, command.link_key)
        source = memoryview(held.pixels)
        for number, first in enumerate(range(0, len(source), link.frame_bytes)):
            if self._images.get(key) is not held:
                return
            part = source[first : first + link.frame_bytes]
            await _send(link, command, number, first, part)
            self.num_pushed_bytes += len(part)


@contextmanager
def _logged(command: FetchPixels) -> Iterator[None]:
    """Logs the error that ends a push."""
    try:
        yield
    except HearthError as error:
        event = "pixel_link_lost" if isinstance(error, LinkLost) else "pixels_refused"
        log.info(event, worker=command.worker_id, reason=error.message)
    except TimeoutError:
        log.info("pixels_late", worker=command.worker_id, deadline_s=command.deadline_s)
    except BaseException as raised:  # outermost handler
        item_error(raised)
        log.exception("pixel_push_failed", worker=command.worker_id)


async def _send(
    link: PushLink, command: FetchPixels, number: int, first: int, part: memoryview
) -> None:
    async def fill(slot: memoryview) -> None:
        slot[:] = part

    header = byte_header(command.transfer_id, number, first, len(part))
    await link.send(header, fill, command.tenant_id, is_private=True)
