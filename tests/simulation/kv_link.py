"""The KV link seam without sockets: one object is the receiver, another dials any of them.

Nothing here waits but fills and sinks, so a simulation with its own clock stays deterministic.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from shared.errors import FrameRefused, LinkLost
from shared.kv_wire.frames import fault_of
from shared.kv_wire.link import Fill, FrameHeader, FrameSink
from shared.kv_wire.pieces import checksum_of
from shared.kv_wire.placements import Placements, ReceiverCounts
from shared.messages import DataPlaneAddress


class SimulatedReceiver:
    """A `KvReceiver`. `corrupt_next` and `drop_links` are the faults a scenario can order."""

    def __init__(self, network: SimulatedDialer, instance_id: bytes) -> None:
        self.address = DataPlaneAddress(
            host="simulated", port=0, unix_path="", instance_id=instance_id
        )
        self.is_closed = False
        self._placements = Placements()
        self._links: list[SimulatedLink] = []
        self._to_corrupt: set[bytes] = set()
        network.receivers[instance_id] = self

    @property
    def counts(self) -> ReceiverCounts:
        return self._placements.counts

    def expect(self, placement_id: bytes, sink: FrameSink) -> None:
        self._placements.expect(placement_id, sink)

    def forget(self, placement_id: bytes) -> None:
        self._placements.forget(placement_id)

    async def quiet(self, placement_id: bytes) -> None:
        await self._placements.quiet(placement_id)

    async def close(self) -> None:
        self.is_closed = True
        self.drop_links()

    def corrupt_next(self, placement_id: bytes) -> None:
        """One bit of the next frame of this placement changes on the way."""
        self._to_corrupt.add(placement_id)

    def drop_links(self) -> None:
        for link in list(self._links):
            link.lose("the simulated connection ended")

    def attach(self, link: SimulatedLink) -> None:
        self._links.append(link)

    def detach(self, link: SimulatedLink) -> None:
        self._links.remove(link)
        self._placements.carrier_ended(link)

    async def take(self, link: SimulatedLink, header: FrameHeader, payload: bytearray) -> None:
        self._placements.announce(header, link)
        if header.placement_id in self._to_corrupt:
            self._to_corrupt.remove(header.placement_id)
            payload[0] ^= 1

        async def copy() -> tuple[memoryview, int]:
            view = memoryview(payload)
            return view, checksum_of(view)

        reason = await self._placements.deliver(header, copy)
        if reason is not None:
            raise FrameRefused(reason)


class SimulatedLink:
    """A `PushLink`: one frame after the other, each in a buffer of its own."""

    def __init__(self, receiver: SimulatedReceiver) -> None:
        self.is_lost = False
        self._receiver = receiver
        self._turn = asyncio.Lock()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        receiver.attach(self)

    async def send(self, header: FrameHeader, fill: Fill) -> None:
        if (fault := fault_of(header)) is not None:
            raise FrameRefused(fault)
        async with self._turn:
            self._raise_if_lost()
            payload = bytearray(header.payload_bytes)
            await fill(memoryview(payload))
            self._raise_if_lost()
            checksum = checksum_of(memoryview(payload))
            checked = msgspec.structs.replace(header, checksum=checksum)
            taken = asyncio.ensure_future(self._receiver.take(self, checked, payload))
            # A delivery runs to its end at the receiver; after a loss its result reaches nobody.
            taken.add_done_callback(lambda done: done.cancelled() or done.exception())
            waits: set[asyncio.Future[Any]] = {taken, self._lost}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not taken.done():
                self._raise_if_lost()
            taken.result()

    def lose(self, reason: str) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._lost.set_result(reason)
            self._receiver.detach(self)

    async def close(self) -> None:
        self.lose("this end closed the link")

    def _raise_if_lost(self) -> None:
        if self.is_lost:
            raise LinkLost(self._lost.result())


class SimulatedDialer:
    """A `KvDialer`, and the network: receivers register themselves with it."""

    def __init__(self) -> None:
        self.receivers: dict[bytes, SimulatedReceiver] = {}
        self._links: dict[bytes, SimulatedLink] = {}

    async def link(self, target: DataPlaneAddress) -> SimulatedLink:
        link = self._links.get(target.instance_id)
        if link is not None and not link.is_lost:
            return link
        receiver = self.receivers.get(target.instance_id)
        if receiver is None or receiver.is_closed:
            raise LinkLost("no receiver of this instance is on the simulated network")
        self._links[target.instance_id] = SimulatedLink(receiver)
        return self._links[target.instance_id]

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()
