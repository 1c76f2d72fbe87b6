"""Both ends of a link whose payloads the receiver reads with NIXL out of the sender's slots.

    sender                                    receiver
    Hello(offer: metadata, address, token) ─▶ reads the token: else the own ports serve
                                           ◀─ Welcome(port "nixl")
    fills a slot, Frame(slot_index)        ─▶ reads the slot into a buffer of its own, sums the copy
                                           ◀─ Ack, Refusal: the slot is free

Nobody writes into the receiver's memory, so a late or dead sender cannot change blocks that were
given away. A read that does not end keeps its buffer, and is not waited for once its placement is
forgotten: the buffer returns when nothing of the read arrives any more. Each link has an agent at
each end, which ends with it; the receiver's once all its reads have ended.

NIXL neither encrypts nor authenticates, and its library parses what the peer reports.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import structlog

from shared.background import start_awaited
from shared.clock import Clock
from shared.errors import FrameRefused, LinkLost
from shared.kv_wire.checked_copy import apart_if_large, checksum_of, zero
from shared.kv_wire.expected_pushes import ExpectedPushes
from shared.kv_wire.frame_delivery import Arrival, FrameDelivery
from shared.kv_wire.frames import (
    MAX_REASON_CHARS,
    Frame,
    Goodbye,
    NixlOffer,
    Offer,
    ProtocolError,
    Record,
    sealed_sum,
)
from shared.kv_wire.link import FrameHeader, PageLock
from shared.kv_wire.ports.nixl_agent import Agent, Transfer
from shared.kv_wire.ports.nixl_thread import NixlThread
from shared.kv_wire.record_stream import RecordStream
from shared.kv_wire.shared_memory import PageLockedMap, frames_under_way

log = structlog.get_logger(__name__)

NUM_SLOTS = 4
TOKEN_BYTES = 16
READ_LIMIT_S = 10.0  # of a peer that is alive and does not serve its memory

MakeAgent = Callable[[], Agent]


@dataclass(eq=False)
class _Registered:
    """An agent and the memory of its slots."""

    thread: NixlThread
    agent: Agent
    memory: mmap.mmap
    address: int
    slot_bytes: int

    @classmethod
    async def open(
        cls, thread: NixlThread, make: MakeAgent, slot_bytes: int, page_lock: PageLock | None
    ) -> _Registered:
        """Raises LinkLost. The agent of a caller that is cancelled ends once it exists."""
        memory = PageLockedMap(-1, NUM_SLOTS * slot_bytes)
        if page_lock is not None:
            memory.lock(page_lock)

        def register() -> _Registered:
            agent = make()
            try:
                return cls(thread, agent, memory, agent.register(memory), slot_bytes)
            except BaseException:
                agent.close()
                raise

        opening = start_awaited(thread.call(register))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_end_unused)
            raise

    def end(self) -> None:
        """Ends the agent."""
        self.thread.order(self.agent.close)

    def view(self, index: int, num_bytes: int) -> memoryview:
        start = index * self.slot_bytes
        return memoryview(self.memory)[start : start + num_bytes]


def _end_unused(opening: asyncio.Future[_Registered]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().end()


class NixlSlots:
    """The sender's slots, before and while it has a link. `close` ends them."""

    def __init__(self, registered: _Registered, offer: NixlOffer) -> None:
        self.offer = offer
        self.registered = registered
        self.is_busy: Callable[[], bool] = lambda: True  # until the receiver has replied
        thread = registered.thread
        self._stop_serving = thread.serve(registered.agent, lambda: self.is_busy())

    @classmethod
    async def open(
        cls, thread: NixlThread, make: MakeAgent, slot_bytes: int, page_lock: PageLock | None
    ) -> NixlSlots:
        registered = await _Registered.open(thread, make, slot_bytes, page_lock)
        token = os.urandom(TOKEN_BYTES)
        registered.view(0, TOKEN_BYTES)[:] = token
        try:
            metadata = await thread.call(registered.agent.metadata)
        except BaseException:
            registered.end()
            raise
        offer = NixlOffer(metadata, registered.address, NUM_SLOTS, slot_bytes, token)
        return cls(registered, offer)

    def close(self) -> None:
        self._stop_serving()
        self.registered.end()


class NixlStaging:
    """The sender's slots of a link: a `Staging`."""

    def __init__(self, slots: NixlSlots, frame_bytes: int) -> None:
        self.num_slots, self.max_frame_bytes = NUM_SLOTS, slots.registered.slot_bytes
        self.frame_bytes = frame_bytes
        self.frames_under_way = frames_under_way(frame_bytes, NUM_SLOTS)
        self._slots: NixlSlots | None = slots

    def watch(self, num_unacked: Callable[[], int]) -> None:
        """Serves reads at once while frames are unacknowledged."""
        if self._slots is not None:
            self._slots.is_busy = lambda: num_unacked() > 0

    def view(self, slot_index: int, num_bytes: int) -> memoryview:
        assert self._slots is not None, "the link has not ended"
        return self._slots.registered.view(slot_index, num_bytes)

    def transmit(
        self, stream: RecordStream, frame_id: int, header: FrameHeader, slot_index: int
    ) -> None:
        stream.send(Frame(frame_id, header, slot_index))
        if self._slots is not None:
            self._slots.registered.thread.wake()

    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()
        self._slots = None


class NixlReads:
    """The receiver's agent of a link, and its buffers. Construct with `open`."""

    def __init__(self, registered: _Registered, peer: str, offer: NixlOffer) -> None:
        self.slot_bytes = registered.slot_bytes
        self._registered = registered
        self._peer = peer
        self._offer = offer
        self._free = list(range(NUM_SLOTS))
        self._is_closed = False
        self._num_reads = 0

    @classmethod
    async def open(
        cls,
        thread: NixlThread,
        make: MakeAgent,
        offer: NixlOffer,
        page_lock: PageLock | None,
        *,
        timeout_s: float,
    ) -> NixlReads:
        """Connects to the sender's agent and reads its token. Raises LinkLost."""
        if offer.num_slots != NUM_SLOTS or len(offer.token) != TOKEN_BYTES:
            raise LinkLost(f"it offers {offer.num_slots} slots, {len(offer.token)} bytes of token")
        registered = await _Registered.open(thread, make, offer.slot_bytes, page_lock)
        reads: NixlReads | None = None
        try:
            async with asyncio.timeout(timeout_s):
                peer = await thread.call(registered.agent.connect, offer.metadata)
                reads = cls(registered, peer, offer)
                buffer = reads.take()
                ended = reads.read(0, buffer, TOKEN_BYTES)
                await asyncio.shield(ended)
            if bytes(reads.view(buffer, TOKEN_BYTES)) != offer.token:
                raise LinkLost("its memory does not have the token that it sent")
            reads.give_back(buffer)
        except BaseException as error:
            if reads is None:
                registered.end()
            else:
                reads.close()
            if isinstance(error, TimeoutError):
                raise LinkLost(f"its memory could not be read within {timeout_s:g} s") from error
            raise
        return reads

    def take(self) -> int:
        """Returns a free buffer. Raises LinkLost if reads of all of them do not end."""
        if not self._free:
            raise LinkLost(f"{NUM_SLOTS} reads of the peer's memory do not end")
        return self._free.pop()

    def give_back(self, buffer: int) -> None:
        self._free.append(buffer)

    def view(self, buffer: int, num_bytes: int) -> memoryview:
        return self._registered.view(buffer, num_bytes)

    def read(self, slot_index: int, buffer: int, num_bytes: int) -> asyncio.Future[None]:
        """Starts to read a slot. Done, or failed, once nothing arrives any more."""
        source = self._offer.address + slot_index * self._offer.slot_bytes
        destination = self._registered.address + buffer * self.slot_bytes
        agent, peer = self._registered.agent, self._peer

        def start() -> Transfer:
            return agent.read(peer, source, destination, num_bytes)

        self._num_reads += 1
        ended = self._registered.thread.read(start, self._registered)
        ended.add_done_callback(self._read_ended)
        return ended

    def close(self) -> None:
        """Ends the agent once its reads have ended. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._end_agent()

    def _read_ended(self, _: object) -> None:
        self._num_reads -= 1
        if self._is_closed:
            self._end_agent()

    def _end_agent(self) -> None:
        if not self._num_reads:
            self._registered.end()


class NixlReception:
    """The receiver's end: reads a slot as soon as its frame is announced."""

    def __init__(
        self,
        placements: ExpectedPushes,
        clock: Clock,
        reads: NixlReads,
        *,
        peer_region: str = "",
    ) -> None:
        self.stream = RecordStream(self)
        self.deliveries = FrameDelivery(
            placements, self.stream, clock, peer_region, max_frame_bytes=reads.slot_bytes
        )
        self.deliveries.task.add_done_callback(lambda _: reads.close())
        self._placements = placements
        self._reads = reads
        self._held_slots: set[int] = set()

    def record_arrived(self, record: Record) -> None:
        if isinstance(record, Offer):
            self.deliveries.offered(record)
            return
        if not isinstance(record, Frame) or record.slot_index is None or record.codec:
            raise ProtocolError(f"a sender does not send {type(record).__name__} here")
        slot_index = record.slot_index
        if not 0 <= slot_index < NUM_SLOTS or slot_index in self._held_slots:
            raise ProtocolError(f"slot {slot_index} does not exist or is in use")
        self.deliveries.announce(record)
        try:
            buffer = self._reads.take()
        except LinkLost as error:
            with suppress(LinkLost):
                self._lose(error.message)
            return
        self._held_slots.add(slot_index)
        ended = self._reads.read(slot_index, buffer, record.header.payload_bytes)
        take_copy = partial(self._take_copy, record.header, buffer, ended)
        release = partial(self._release, slot_index, buffer, record.header.payload_bytes, ended)
        self.deliveries.add(Arrival(record, take_copy, release, release))

    def payload_arrived(self, checksum: int) -> None:
        raise ProtocolError("payloads are not sent on this connection")

    def ended(self, error: LinkLost) -> None:
        self.deliveries.end(error)

    async def _take_copy(
        self, header: FrameHeader, buffer: int, ended: asyncio.Future[None]
    ) -> tuple[memoryview, int]:
        """Raises FrameRefused if the placement is forgotten first, and LinkLost, which ends the
        link, if the slot cannot be read.
        """
        forgotten = self._placements.until_forgotten(header.placement_id)
        await asyncio.wait(
            {ended, forgotten}, timeout=READ_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not ended.done():
            if forgotten.done():
                raise FrameRefused("its placement was forgotten before it was read")
            self._lose(f"no slot was read within {READ_LIMIT_S:g} s")
        if (error := ended.exception()) is not None:
            self._lose(str(error))
        copy = self._reads.view(buffer, header.payload_bytes)
        return copy, sealed_sum(header, await apart_if_large(copy, checksum_of, copy))

    def _lose(self, reason: str) -> NoReturn:
        error = LinkLost(reason)
        log.warning("kv_slot_not_read", reason=reason)
        self.stream.send(Goodbye(reason[:MAX_REASON_CHARS]))
        self.stream.end(error)
        raise error

    def _release(
        self,
        slot_index: int,
        buffer: int,
        num_bytes: int,
        ended: asyncio.Future[None],
        is_private: bool,
    ) -> None:
        self._held_slots.discard(slot_index)

        def give_back(_: object) -> None:
            if is_private:
                zero(self._reads.view(buffer, num_bytes))
            self._reads.give_back(buffer)

        if ended.done():
            give_back(ended)
        else:
            ended.add_done_callback(give_back)
