"""A worker's end of the pixel plane: fetches the pixels of one image of a request.

    FetchPixels ──▶ gateway            with a new transfer id
    frames      ◀── gateway            checked, and in order: the next bytes of the image
    complete, or an error              the transfer is forgotten: late frames are rejected

A fetch whose link or frames are lost is tried again until its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.clock import Clock
from shared.errors import DependencyUnavailable, Overloaded
from shared.kv_wire.link import KvReceiver
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import PLACEMENT_ID_BYTES, Done, FetchPixels
from shared.pixels.byte_transfer import STALL_S, ByteTransfer
from shared.pixels.pixel_frames import image_bytes
from shared.randomness import Randomness
from shared.subjects import pixels
from shared.transport.timed_requests import TimedRequests

ACK_S = 0.5  # plus the round trip
RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelRequest:
    """What a worker needs to fetch an image."""

    gateway_id: str
    tenant_id: str
    request_id: str
    image_hash: bytes
    shape: tuple[int, ...]
    region_class: str = ""  # that of the tenant
    allowed_regions: tuple[str, ...] = ()  # empty: all


class PixelFetcher:
    def __init__(
        self,
        requests: TimedRequests,
        worker_id: str,
        receiver: KvReceiver,
        link_keys: LinkKeys | None,
        clock: Clock,
        randomness: Randomness,
    ) -> None:
        """`receiver` listens for frames; `link_keys` seal links over TCP, unless None."""
        self._requests = requests
        self._worker_id = worker_id
        self._receiver = receiver
        self._link_keys = link_keys
        self._clock = clock
        self._randomness = randomness

    async def fetch(self, request: PixelRequest, deadline_s: float) -> memoryview:
        """Returns the pixels, in memory that nothing else uses. Raises InvalidRequest if the
        gateway does not hold them, DependencyUnavailable if they have not come by the deadline.
        """
        until = self._clock.now() + deadline_s
        while True:
            try:
                return await self._try(request, max(0.0, until - self._clock.now()))
            except (DependencyUnavailable, Overloaded) as error:
                if self._clock.now() + RETRY_S >= until:
                    raise DependencyUnavailable(
                        f"the pixels of an image have not come: {error.message}"
                    ) from error
            await self._clock.sleep(RETRY_S)

    async def close(self) -> None:
        await self._receiver.close()

    async def _try(self, request: PixelRequest, deadline_s: float) -> memoryview:
        transfer_id = self._randomness.bytes(PLACEMENT_ID_BYTES)
        transfer = ByteTransfer(image_bytes(request.shape))
        # private for any tenant: neither end of a fetch knows who has zero retention by now
        self._receiver.expect(transfer_id, transfer, is_private=True)
        try:
            await self._ask(request, transfer_id, deadline_s)
            return await transfer.complete(STALL_S)
        finally:
            self._receiver.forget(transfer_id)

    async def _ask(self, request: PixelRequest, transfer_id: bytes, deadline_s: float) -> None:
        gateway_id, keys = request.gateway_id, self._link_keys
        command = FetchPixels(
            worker_id=self._worker_id,
            tenant_id=request.tenant_id,
            request_id=request.request_id,
            image_hash=request.image_hash,
            shape=request.shape,
            transfer_id=transfer_id,
            target=self._receiver.address,
            link_key=None if keys is None else keys.key_for(gateway_id),
            deadline_s=deadline_s,
            region_class=request.region_class,
        )
        await self._requests.request(gateway_id, pixels(gateway_id), command, Done, base_s=ACK_S)
