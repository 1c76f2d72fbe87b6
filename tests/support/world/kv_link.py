"""The KV link seam without sockets: the real protocol over an in-memory connection, with faults.

Both ends are the real ones of TCP: staging, records, checksums, deliveries. Only the transport is
simulated. A connection preserves the order of its bytes and loses none, until it ends; TCP drops a
peer that acknowledges nothing for DEAD_HOST_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from shared.errors import LinkLost
from shared.kv_wire import tcp
from shared.kv_wire.checked_copy import checksum_of
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.expected_pushes import ExpectedPushes, ReceiverCounts
from shared.kv_wire.frames import Frame, sealed_sum
from shared.kv_wire.link import FrameHeader, FrameSink, LinkEnd, PushBounds
from shared.kv_wire.ports.push_plan import plan_push
from shared.kv_wire.push_link import StagedLink
from shared.kv_wire.record_stream import RecordStream
from shared.kv_wire.tcp import TcpReception, TcpStaging
from shared.messages import DataPlaneAddress, LinkKey
from tests.support.world.clock import VirtualClock
from tests.support.world.process import SimulatedProcess

LATENCY_S = 0.0001
NO_HOST = SimulatedProcess("nobody")


@dataclass(frozen=True, slots=True)
class FrameFate:
    """What happens to a frame on its way.

    If `is_forged`, it carries other KV with a valid checksum, as from a faulty sender.
    `replacement` replaces the frame's own header.
    """

    num_copies: int = 1
    is_corrupt: bool = False
    is_forged: bool = False
    is_truncated: bool = False
    stall_s: float = 0.0
    replacement: FrameHeader | None = None


HARMLESS = FrameFate()
FrameTap = Callable[[SimulatedProcess, SimulatedProcess, FrameHeader, bytes], None]


@dataclass(eq=False)
class DataPlane:
    """All receivers that can be dialled, and the fate of frames to them."""

    receivers: dict[bytes, SimulatedReceiver] = field(default_factory=dict)
    # (sender, receiver, header) -> the fate of the frame
    fate: Callable[[str, str, FrameHeader], FrameFate] = lambda sender, receiver, header: HARMLESS
    # (sender, receiver) -> additional one-way delay
    distance_s: Callable[[str, str], float] = lambda sender, receiver: 0.0
    taps: list[FrameTap] = field(default_factory=list)


class _End(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, process: SimulatedProcess, delay_s: float = LATENCY_S) -> None:
        super().__init__()
        self.process = process
        self.delay_s = delay_s
        self.protocol: RecordStream | None = None
        self.peer: _End | None = None
        self.arrives_at = 0.0
        self._is_closing = False
        self._is_lost = False

    def connect(self, peer: _End, protocol: RecordStream) -> None:
        self.peer, self.protocol = peer, protocol
        protocol.connection_made(self)
        if self._is_closing:  # the peer ended it after its reply and before this end took it up
            self._lose_soon()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            chunk = bytes(data)
            self._send(lambda peer: peer.receive(chunk))

    def stall(self, delay_s: float) -> None:
        """Delays later writes by `delay_s`; if that is too long for TCP, breaks the connection."""
        loop = asyncio.get_running_loop()
        if delay_s >= tcp.DEAD_HOST_S:
            loop.call_later(tcp.DEAD_HOST_S, self.break_off)
        self.arrives_at = loop.time() + delay_s

    def receive(self, chunk: bytes) -> None:
        protocol, first = self.protocol, 0
        while protocol is not None and first < len(chunk) and not self._is_lost:
            buffer = protocol.get_buffer(-1)
            count = min(len(buffer), len(chunk) - first)
            buffer[:count] = chunk[first : first + count]
            protocol.buffer_updated(count)
            first += count

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        """Closes the connection; earlier writes still arrive."""
        if not self._is_closing:
            self._is_closing = True
            self._send(_End.lose)
            self._lose_soon()

    def abort(self) -> None:
        self.close()

    def break_off(self) -> None:
        """Ends the connection for both ends, and drops data in flight."""
        for end in (self, self.peer):
            if end is not None:
                end._is_closing = True
                end._lose_soon()

    def lose(self) -> None:
        self._is_closing = True
        if not self._is_lost and self.protocol is not None:
            self._is_lost = True
            self.protocol.connection_lost(None)

    def _send(self, act: Callable[[_End], None]) -> None:
        peer, loop = self.peer, asyncio.get_running_loop()
        if peer is not None:
            self.arrives_at = max(self.arrives_at, loop.time() + self.delay_s)
            loop.call_at(self.arrives_at, peer.process.arrive, lambda: act(peer))

    def _lose_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.process.arrive, self.lose)


class _FaultyStaging(TcpStaging):
    def __init__(self, sender: SimulatedProcess, receiver: SimulatedReceiver, end: _End) -> None:
        super().__init__(tcp.NUM_SLOTS)
        self._sender = sender
        self._receiver = receiver
        self._end = end

    def transmit(
        self, stream: RecordStream, frame_id: int, header: FrameHeader, slot_index: int
    ) -> None:
        payload = bytearray(self.view(slot_index, header.payload_bytes))
        for tap in self._receiver.plane.taps:
            tap(self._sender, self._receiver.process, header, payload)
        fate = self._receiver.fate_of(self._sender.process_id, header)
        if fate.is_corrupt or fate.is_forged:
            payload[0] ^= 1
        if fate.is_forged:
            checksum = sealed_sum(header, checksum_of(memoryview(payload)))
            header = msgspec.structs.replace(header, checksum=checksum)
        header = fate.replacement or header
        if fate.stall_s:
            self._end.stall(fate.stall_s)
        if fate.is_truncated:
            stream.send(Frame(frame_id, header), memoryview(payload)[: len(payload) // 2])
            self._end.break_off()
            return
        for _ in range(fate.num_copies):
            stream.send(Frame(frame_id, header), memoryview(payload))


class SimulatedReceiver:
    """A `KvReceiver`. A scenario can order the faults `corrupt_next` and `drop_links`."""

    def __init__(
        self,
        plane: DataPlane | SimulatedDialer,
        instance_id: bytes,
        process: SimulatedProcess = NO_HOST,
        region: str = "",
    ) -> None:
        self.address = DataPlaneAddress(
            host="simulated", port=0, unix_path="", instance_id=instance_id
        )
        self.process = process
        self.is_closed = False
        self.plane = plane if isinstance(plane, DataPlane) else plane.plane
        self._placements = ExpectedPushes(region)
        self._ends: dict[_End, TcpReception] = {}
        self._to_corrupt: set[bytes] = set()
        self._forgotten: set[bytes] = set()
        self.plane.receivers[instance_id] = self

    @property
    def counts(self) -> ReceiverCounts:
        return self._placements.counts

    @property
    def num_expected(self) -> int:
        """Placements whose frames may arrive or are being copied."""
        return len(self._placements._expected) + len(self._placements._num_copying)

    def expect(
        self,
        placement_id: bytes,
        sink: FrameSink,
        bounds: PushBounds | None = None,
        *,
        is_private: bool = False,
    ) -> None:
        self._placements.expect(placement_id, sink, bounds, is_private=is_private)

    def forget(self, placement_id: bytes) -> None:
        self._placements.forget(placement_id)
        self._forgotten.add(placement_id)

    async def idle(self, placement_id: bytes) -> None:
        await self._placements.idle(placement_id)

    async def close(self) -> None:
        self.is_closed = True
        tasks = [reception.deliveries.task for reception in self._ends.values()]
        self.drop_links()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def corrupt_next(self, placement_id: bytes) -> None:
        """Flips one bit of the next frame of this placement."""
        self._to_corrupt.add(placement_id)

    def drop_links(self) -> None:
        for end in list(self._ends):
            end.break_off()

    def fate_of(self, sender_id: str, header: FrameHeader) -> FrameFate:
        if header.placement_id in self._to_corrupt:
            self._to_corrupt.remove(header.placement_id)
            return FrameFate(is_corrupt=True)
        if header.placement_id in self._forgotten:  # the content of late frames must not matter
            return FrameFate(is_forged=True)
        return self.plane.fate(sender_id, self.process.process_id, header)

    @property
    def region(self) -> str:
        return self._placements.region

    def accept(self, sender: _End, region: str = "") -> None:
        """Creates the receiver's end of a new connection from a sender in `region`."""
        end = _End(self.process, sender.delay_s)
        reception = TcpReception(self._placements, VirtualClock(), peer_region=region)
        self._ends[end] = reception
        reception.deliveries.task.add_done_callback(lambda _: self._ends.pop(end, None))
        end.connect(sender, reception.stream)
        sender.peer = end


class SimulatedDialer(Dialer):
    """A `KvDialer` with everything real except for the socket."""

    def __init__(
        self,
        plane: DataPlane | None = None,
        process: SimulatedProcess = NO_HOST,
        region: str = "",
    ) -> None:
        super().__init__(region=region)
        self.plane = DataPlane() if plane is None else plane
        self._process = process
        self._ends: list[_End] = []

    @property
    def receivers(self) -> dict[bytes, SimulatedReceiver]:
        return self.plane.receivers

    def drop_links(self) -> None:
        for end in self._ends:
            end.break_off()
        self._ends.clear()

    async def _reach(
        self,
        target: DataPlaneAddress,
        link_key: LinkKey | None,
        on_end: Callable[[StagedLink], None],
    ) -> StagedLink:
        receiver = self.receivers.get(target.instance_id)
        if receiver is None or receiver.is_closed or receiver.process.is_dead:
            raise LinkLost("no receiver of this instance is on the simulated network")
        one_way_s = self.plane.distance_s(self._process.process_id, receiver.process.process_id)
        end = _End(self._process, LATENCY_S + one_way_s)
        await self._welcome(receiver, end, one_way_s)
        self._ends = [each for each in self._ends if not each.is_closing()]
        self._ends.append(end)
        staging = _FaultyStaging(self._process, receiver, end)
        plan = plan_push(LinkEnd(), LinkEnd(), is_local=False)
        link = StagedLink(staging, on_end, regions=(self.region, receiver.region), plan=plan)
        assert end.peer is not None
        end.connect(end.peer, link.stream)
        return link

    async def _welcome(self, receiver: SimulatedReceiver, end: _End, one_way_s: float) -> None:
        """Both hosts' kernels connect in a round trip; the receiver replies once it is awake."""
        welcomed = asyncio.get_running_loop().create_future()

        def accept() -> None:
            if not receiver.is_closed and not welcomed.done():
                receiver.accept(end, self.region)
                _after(one_way_s, lambda: self._process.arrive(greet))

        def greet() -> None:
            if not welcomed.done():
                welcomed.set_result(None)

        _after(3 * one_way_s, lambda: receiver.process.arrive(accept))
        await welcomed


def _after(delay_s: float, act: Callable[[], object]) -> None:
    if delay_s:
        asyncio.get_running_loop().call_later(delay_s, act)
    else:
        act()
