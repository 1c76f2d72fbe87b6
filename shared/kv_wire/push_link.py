"""Prefill's end of one connection, the same for both transports.

Frames are filled, summed and sent one at a time: those of a tenant in the order of the calls, and
one of each tenant in turn, so that many pushes of one do not delay another's. Each frame holds its
slot until the receiver has replied or the connection has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from shared.errors import FrameRefused, LinkLost
from shared.kv_wire.checked_copy import checksum_of, is_large, to_the_end, zero
from shared.kv_wire.compression import LinkCompression, Sent
from shared.kv_wire.frames import (
    Accepted,
    Ack,
    Declined,
    Frame,
    Offer,
    ProtocolError,
    Record,
    Refusal,
    fault_of,
    sealed_sum,
)
from shared.kv_wire.link import Fill, FrameHeader, PushPlan
from shared.kv_wire.record_stream import RecordStream

if TYPE_CHECKING:
    from shared.kv_wire.sealing.ciphers import LinkCiphers

MIN_MEASURED_BYTES = 1 << 20
NEWEST_SHARE = 0.3  # of a push in the rate of the next ones


class Staging(Protocol):
    """The slots that a sender fills, and the transmission of a filled one."""

    num_slots: int
    max_frame_bytes: int
    # recommended for one push
    frame_bytes: int
    frames_under_way: int

    def view(self, slot_index: int, num_bytes: int) -> memoryview: ...

    def transmit(
        self, stream: RecordStream, frame_id: int, header: FrameHeader, slot_index: int
    ) -> None: ...

    def close(self) -> None: ...


class TenantTurns:
    """Admits one holder at a time. Callers of one tenant hold it in the order of their calls, and a
    tenant waits for at most one holder of each other tenant.
    """

    def __init__(self) -> None:
        self._is_held = False
        # in the order of their turns; each has waited since its last one
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        await self._acquire(tenant_id)
        try:
            yield
        finally:
            self._pass_on()

    async def _acquire(self, tenant_id: str) -> None:
        if not self._is_held:
            self._is_held = True
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # it was this caller's turn already
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            tenant_id = next(iter(self._waiting))
            waiters = self._waiting.pop(tenant_id)
            waiter = waiters.popleft()
            if waiters:
                self._waiting[tenant_id] = waiters
            if not waiter.done():  # else its caller was cancelled
                waiter.set_result(None)
                return
        self._is_held = False


class Slots:
    """Free slots, last used first because it is still cached. Only one caller may wait."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._waiter: asyncio.Future[None] | None = None

    async def acquire(self) -> int:
        """Waits for a free slot. Raises LinkLost if `fail` is called meanwhile."""
        while not self._free:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._free.pop()

    def release(self, slot_index: int) -> None:
        self._free.append(slot_index)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: LinkLost) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)


@dataclass(frozen=True)
class _Unacked:
    slot_index: int
    answered: asyncio.Future[None]
    sent: Sent | None  # None on links without compression
    private: memoryview  # what to zero of the slot; empty if the push is not private


class StagedLink:
    """A `PushLink` over a Staging; `on_end` is called once when the connection has ended.

    `compression` and `ciphers` are only for links whose payloads follow on the stream. `regions`
    are those of this end and of the receiver.
    """

    def __init__(
        self,
        staging: Staging,
        on_end: Callable[[StagedLink], None],
        compression: LinkCompression | None = None,
        ciphers: LinkCiphers | None = None,
        regions: tuple[str, str] = ("", ""),
        *,
        plan: PushPlan,
    ) -> None:
        self.regions, self.plan = regions, plan
        self._is_measured = False
        self._offers: dict[bytes, asyncio.Future[None]] = {}
        self._staging = staging
        self._on_end = on_end
        self._compression = compression
        self._slots = Slots(staging.num_slots)
        self._turns = TenantTurns()
        self._unacked: dict[int, _Unacked] = {}
        self._num_frames = 0
        self._lost: str | None = None
        self.stream = RecordStream(self, ciphers)

    @property
    def frame_bytes(self) -> int:
        return self._staging.frame_bytes

    @property
    def frames_under_way(self) -> int:
        return self._staging.frames_under_way

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    @property
    def num_unacked(self) -> int:
        return len(self._unacked)

    async def send(
        self, header: FrameHeader, fill: Fill, tenant_id: str = "", *, is_private: bool = False
    ) -> None:
        """Sends a frame: see `PushLink.send`. `fill` has always ended when this returns or
        raises.
        """
        if (fault := fault_of(header, self._staging.max_frame_bytes)) is not None:
            raise FrameRefused(fault)
        async with self._turns.turn(tenant_id):
            answered = await self._fill_and_transmit(header, fill, is_private=is_private)
        await answered

    async def offer(self, placement_id: bytes) -> None:
        """Asks to push a placement: see `PushLink.offer`."""
        self._raise_if_lost()
        reply = self._offers.get(placement_id)
        if reply is None:
            reply = self._offers[placement_id] = asyncio.get_running_loop().create_future()
            reply.add_done_callback(partial(self._offer_ended, placement_id))
            self.stream.send(Offer(placement_id))
        await asyncio.shield(reply)

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Records a complete push: see `PushLink.observe`. Small ones tell of latency only."""
        if num_bytes < MIN_MEASURED_BYTES or seconds <= 0:
            return
        byte_s, last_s = seconds / num_bytes, 1 / self.plan.bytes_per_s
        share = NEWEST_SHARE if self._is_measured else 1.0
        self._is_measured = True
        rate = 1 / (share * byte_s + (1 - share) * last_s)
        self.plan = msgspec.structs.replace(self.plan, bytes_per_s=rate)

    async def close(self) -> None:
        await self.stream.close("this end closed the link")

    async def _fill_and_transmit(
        self, header: FrameHeader, fill: Fill, *, is_private: bool
    ) -> asyncio.Future[None]:
        self._raise_if_lost()
        slot_index, private = await self._slots.acquire(), memoryview(b"")
        try:
            self._raise_if_lost()  # while waiting for the slot
            view = self._staging.view(slot_index, header.payload_bytes)
            private = view if is_private else private
            await to_the_end(fill(view))
            self._raise_if_lost()
            if self.stream.ciphers is None:
                if is_large(view):
                    payload_sum = await to_the_end(asyncio.to_thread(checksum_of, view))
                    self._raise_if_lost()
                else:
                    payload_sum = checksum_of(view)
                checksum = sealed_sum(header, payload_sum)
                header = msgspec.structs.replace(header, checksum=checksum)
            coded = sent = None
            if self._compression is not None:
                coded = await self._compression.coded(slot_index, view)
                self._raise_if_lost()
                sent = self._compression.sent(view, coded)
            frame_id, self._num_frames = self._num_frames, self._num_frames + 1
            self._transmit(frame_id, header, slot_index, coded)
        except BaseException:
            self._zero(slot_index, private)
            self._slots.release(slot_index)
            raise
        answered = asyncio.get_running_loop().create_future()
        self._unacked[frame_id] = _Unacked(slot_index, answered, sent, private)
        return answered

    def _zero(self, slot_index: int, private: memoryview) -> None:
        """Zeroes the KV of a private push in a slot, also as it was compressed."""
        zero(private)
        if private and self._compression is not None:
            zero(self._compression.last_coded(slot_index))

    def _transmit(
        self, frame_id: int, header: FrameHeader, slot_index: int, coded: memoryview | None
    ) -> None:
        if self._compression is None or coded is None:
            self._staging.transmit(self.stream, frame_id, header, slot_index)
        else:
            codec = self._compression.codec_name
            frame = Frame(frame_id, header, codec=codec, coded_bytes=len(coded))
            buffer = self._compression.buffer_of(slot_index)
            self.stream.send(frame, buffer[: len(coded) + self.stream.tag_bytes])

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise LinkLost(self._lost)

    # ── callbacks of the stream ──────────────────────────────────────────────────────────────────

    def record_arrived(self, record: Record) -> None:
        match record:
            case Ack():
                self._answer(record, None)
            case Refusal(reason=reason):
                self._answer(record, FrameRefused(reason))
            case Accepted(placement_id=placement_id):
                self._answer_offer(placement_id, None)
            case Declined(placement_id=placement_id, reason=reason):
                self._answer_offer(placement_id, FrameRefused(reason))
            case _:
                raise ProtocolError(f"a receiver does not send {type(record).__name__}")

    def _offer_ended(self, placement_id: bytes, reply: asyncio.Future[None]) -> None:
        del self._offers[placement_id]
        reply.exception()  # a caller may have been cancelled

    def _answer_offer(self, placement_id: bytes, rejection: FrameRefused | None) -> None:
        reply = self._offers.get(placement_id)
        if reply is None or reply.done():
            raise ProtocolError(f"received a reply to the offer {placement_id.hex()}: not sent")
        if rejection is None:
            reply.set_result(None)
        else:
            reply.set_exception(rejection)

    def payload_arrived(self, checksum: int) -> None:
        raise ProtocolError("a receiver sends no payload")

    def ended(self, error: LinkLost) -> None:
        self._lost = error.message
        self._slots.fail(LinkLost(error.message))
        for unacked in self._unacked.values():
            self._zero(unacked.slot_index, unacked.private)
            if not unacked.answered.done():
                unacked.answered.set_exception(LinkLost(error.message))
        self._unacked.clear()
        for reply in self._offers.values():
            if not reply.done():
                reply.set_exception(LinkLost(error.message))
        self._staging.close()
        self._on_end(self)

    def _answer(self, answer: Ack | Refusal, rejection: FrameRefused | None) -> None:
        unacked = self._unacked.pop(answer.frame_id, None)
        if unacked is None:
            raise ProtocolError(f"received a reply to frame {answer.frame_id}: not in flight")
        if self._compression is not None and unacked.sent is not None:
            self._compression.answered(unacked.sent, answer)
        self._zero(unacked.slot_index, unacked.private)
        self._slots.release(unacked.slot_index)
        if unacked.answered.done():  # the caller was cancelled
            return
        if rejection is None:
            unacked.answered.set_result(None)
        else:
            unacked.answered.set_exception(rejection)
