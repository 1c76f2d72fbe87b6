"""The placements that a receiver expects, and the delivery of their frames. No sockets here."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from shared.background import item_error
from shared.errors import HearthError, KvMismatch
from shared.kv_layout import KvShard
from shared.kv_wire.link import OUTSIDE_REGIONS, FrameHeader, FrameSink, PushBounds

log = structlog.get_logger(__name__)

# Makes a private copy of a frame's payload and returns it with the frame's checksum over the copy,
# or None if the payload cannot be decoded. Raises a HearthError if there is no payload.
TakeCopy = Callable[[], Awaitable[tuple[memoryview, int | None]]]


MAX_CARRIERS = 1024  # carriers of one placement, one for each part of the layers and heads


@dataclass
class ReceiverCounts:
    num_frames: int = 0
    num_bytes: int = 0
    num_unknown: int = 0  # frames of a placement that is not expected
    num_corrupt: int = 0
    num_rejected: int = 0  # frames that the sink rejected
    num_mismatched: int = 0  # rejected frames with KV of another format or other numerics
    num_outside: int = 0  # offers and frames from outside of the regions of their placement
    num_bad_peers: int = 0  # violated the protocol, failed the handshake or ended within a frame


@dataclass
class _Expected:
    sink: FrameSink
    bounds: PushBounds | None = None
    is_private: bool = False
    accepted: set[object] = field(default_factory=set)  # connections whose offer was accepted
    # the connection that last carried a frame of each part: several ranks may push to this process
    carriers: dict[KvShard, object] = field(default_factory=dict)
    forgotten: asyncio.Future[None] | None = None  # made for the first that waits for it

    def carried_by(self, carrier: object, header: FrameHeader) -> None:
        if len(self.carriers) >= MAX_CARRIERS:  # the parts are such that no sink accepts them
            self.carriers.pop(next(iter(self.carriers)))
        self.carriers[header.shard] = carrier


class ExpectedPushes:
    def __init__(self, region: str = "") -> None:
        """Expects pushes in a process of this region."""
        self.region = region
        self.counts = ReceiverCounts()
        self._expected: dict[bytes, _Expected] = {}
        self._num_copying: Counter[bytes] = Counter()
        self._idle: dict[bytes, asyncio.Event] = {}

    def expect(
        self,
        placement_id: bytes,
        sink: FrameSink,
        bounds: PushBounds | None = None,
        *,
        is_private: bool = False,
    ) -> None:
        if placement_id in self._expected:
            raise ValueError(f"placement {placement_id.hex()} is expected already")
        self._expected[placement_id] = _Expected(sink, bounds, is_private)

    def forget(self, placement_id: bytes) -> None:
        expected = self._expected.pop(placement_id, None)
        if expected is not None and expected.forgotten is not None:
            expected.forgotten.set_result(None)

    def until_forgotten(self, placement_id: bytes) -> asyncio.Future[None]:
        """Returns what is done once the placement is forgotten, or if it is not expected. It must
        not be cancelled.
        """
        expected = self._expected.get(placement_id)
        if expected is not None and expected.forgotten is not None:
            return expected.forgotten
        forgotten = asyncio.get_running_loop().create_future()
        if expected is None:
            forgotten.set_result(None)
        else:
            expected.forgotten = forgotten
        return forgotten

    async def idle(self, placement_id: bytes) -> None:
        while self._num_copying[placement_id] > 0:
            await self._idle.setdefault(placement_id, asyncio.Event()).wait()

    def offered(self, placement_id: bytes, carrier: object, peer_region: str) -> str | None:
        """Takes an offer of a sender in `peer_region`. Returns None, or the reason for declining
        it.
        """
        expected = self._expected.get(placement_id)
        if expected is None:
            return self._unknown(placement_id)
        if expected.bounds is not None and not expected.bounds.allow(self.region, peer_region):
            return self._outside(expected)
        expected.accepted.add(carrier)
        return None

    def is_private(self, placement_id: bytes) -> bool:
        """Whether buffers with its KV are to be zeroed. A frame that nobody expects may be a late
        one of a private push.
        """
        expected = self._expected.get(placement_id)
        return expected is None or expected.is_private

    def announce(self, header: FrameHeader, carrier: object) -> str | None:
        """Records that a frame of this placement starts to arrive over `carrier`. Returns the
        reason why that must end the connection, if there is one.
        """
        expected = self._expected.get(header.placement_id)
        if expected is None:
            return None
        if expected.bounds is not None and carrier not in expected.accepted:
            return self._outside(expected)
        expected.carried_by(carrier, header)
        return None

    def carrier_ended(self, carrier: object) -> None:
        """Calls `link_lost` once on every sink that received the last frame of a part over
        `carrier`.
        """
        for placement_id, expected in list(self._expected.items()):
            expected.accepted.discard(carrier)
            lost = [part for part, each in expected.carriers.items() if each is carrier]
            if not lost:
                continue
            for part in lost:
                del expected.carriers[part]
            try:
                expected.sink.link_lost()
            except BaseException as raised:
                item_error(raised)
                log.exception("link_lost_handler_failed", placement_id=placement_id.hex())

    async def deliver(self, header: FrameHeader, take_copy: TakeCopy) -> str | None:
        """Copies, verifies and delivers one frame. Returns None, or the reason for rejecting it."""
        expected = self._expected.get(header.placement_id)
        if expected is None:
            return self._unknown(header.placement_id)
        with self._copying(header.placement_id):
            try:
                payload, checksum = await take_copy()
                if self._expected.get(header.placement_id) is not expected:
                    return self._unknown(header.placement_id)
                return await self._hand_over(expected.sink, header, payload, checksum)
            except KvMismatch as error:
                self.counts.num_mismatched += 1
                reason = error.message
            except HearthError as error:
                reason = error.message
            except BaseException as raised:
                failure = item_error(raised)
                log.exception("frame_sink_failed", placement_id=header.placement_id.hex())
                reason = f"{type(failure).__name__}: {failure}"
        self.counts.num_rejected += 1
        return reason

    async def _hand_over(
        self, sink: FrameSink, header: FrameHeader, payload: memoryview, checksum: int | None
    ) -> str | None:
        if checksum != header.checksum:
            self.counts.num_corrupt += 1
            sink.corrupt(header)
            return f"frame {header.sequence_number} failed its checksum"
        await sink.frame(header, payload)
        self.counts.num_frames += 1
        self.counts.num_bytes += header.payload_bytes
        return None

    def _unknown(self, placement_id: bytes) -> str:
        self.counts.num_unknown += 1
        return f"placement {placement_id.hex()} is not expected here"

    def _outside(self, expected: _Expected) -> str:
        self.counts.num_outside += 1
        expected.sink.outside()
        return OUTSIDE_REGIONS

    @contextmanager
    def _copying(self, placement_id: bytes) -> Iterator[None]:
        self._num_copying[placement_id] += 1
        try:
            yield
        finally:
            self._num_copying[placement_id] -= 1
            if self._num_copying[placement_id] == 0:
                del self._num_copying[placement_id]
                if (event := self._idle.pop(placement_id, None)) is not None:
                    event.set()
