"""Decode's end of one connection after the handshake: delivers the frames one at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shared.background import start_awaited
from shared.clock import Clock
from shared.errors import LinkLost
from shared.kv_wire.expected_pushes import ExpectedPushes, TakeCopy
from shared.kv_wire.frames import (
    MAX_REASON_CHARS,
    Accepted,
    Ack,
    Declined,
    Frame,
    Offer,
    ProtocolError,
    Refusal,
    fault_of_frame,
)
from shared.kv_wire.link import MAX_FRAME_BYTES
from shared.kv_wire.record_stream import RecordStream


@dataclass(eq=False)
class Arrival:
    """A frame to deliver. `release` frees its buffer before the acknowledgement is sent, `drop`
    that of a frame that will not be delivered, perhaps while another one is; their argument says
    whether to zero what held the KV. `take_copy` sets `decode_s` if it decodes.
    """

    frame: Frame
    take_copy: TakeCopy
    release: Callable[[bool], None]
    drop: Callable[[bool], None]
    arrived_at: float = 0.0
    decode_s: float = 0.0


class FrameDelivery:
    """Delivers arrivals in order and replies to each; its task lives as long as the connection.
    `peer_region` is that of the sender.
    """

    def __init__(
        self,
        placements: ExpectedPushes,
        stream: RecordStream,
        clock: Clock,
        peer_region: str = "",
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._placements = placements
        self._peer_region = peer_region
        self._stream = stream
        self._clock = clock
        self._waiting: deque[Arrival] = deque()
        self._arrived = asyncio.Event()
        self._has_ended = False
        self.task = start_awaited(self._run())

    def offered(self, offer: Offer) -> None:
        """Replies to the offer of a push."""
        placement_id = offer.placement_id
        reason = self._placements.offered(placement_id, self._stream, self._peer_region)
        reply = Accepted(placement_id) if reason is None else Declined(placement_id, reason)
        self._stream.send_reply(reply)

    def announce(self, frame: Frame) -> None:
        """Records that a frame starts to arrive. Raises ProtocolError if the frame is invalid, or
        may not come from this sender: its payload is not read.
        """
        fault = fault_of_frame(frame, self._max_frame_bytes)
        fault = fault or self._placements.announce(frame.header, self._stream)
        if fault is not None:
            raise ProtocolError(fault)

    def add(self, arrival: Arrival) -> None:
        """Queues an arrival. Each holds a slot or a buffer, which bounds the queue."""
        arrival.arrived_at = self._clock.now()
        self._waiting.append(arrival)
        self._arrived.set()

    def end(self, error: LinkLost) -> None:
        """Drops the queue; a delivery in progress completes."""
        self._has_ended = True
        while self._waiting:
            arrival = self._waiting.popleft()
            arrival.drop(self.is_private(arrival.frame))
        self._arrived.set()
        if isinstance(error, ProtocolError):
            self._placements.counts.num_bad_peers += 1
        self._placements.carrier_ended(self._stream)

    async def _run(self) -> None:
        try:
            while not self._has_ended:
                if self._waiting:
                    await self._deliver(self._waiting.popleft())
                else:
                    self._arrived.clear()
                    await self._arrived.wait()
        finally:  # the sender must stop when deliveries stop
            self._stream.end(LinkLost("the receiver stopped"))

    def is_private(self, frame: Frame) -> bool:
        """Whether to zero what has held the KV of a frame."""
        return self._placements.is_private(frame.header.placement_id)

    async def _deliver(self, arrival: Arrival) -> None:
        frame = arrival.frame
        is_private = self.is_private(frame)
        try:
            reason = await self._placements.deliver(frame.header, arrival.take_copy)
        finally:  # a receiver that closes cancels deliveries
            arrival.release(is_private)
        if self._has_ended:
            return
        held_s = self._clock.now() - arrival.arrived_at
        if reason is None:
            self._stream.send_reply(Ack(frame.frame_id, held_s, arrival.decode_s))
        else:
            self._stream.send_reply(Refusal(frame.frame_id, reason[:MAX_REASON_CHARS], held_s))
