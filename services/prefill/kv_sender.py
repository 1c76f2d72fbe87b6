"""Pushes the KV of one prefill to its decode worker while later chunks are still computed.

waiting for tokens ──computed()──▶ sending, some frames in flight ──all acknowledged──▶ done
every state ──cancel()──▶ ended, as soon as no copy reads the blocks
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shared.clock import Clock
from shared.engine.batching.sequence import Sequence
from shared.engine.runner import KvPort
from shared.kv_layout import first_sent
from shared.kv_wire.link import FRAME_BYTES, FRAMES_UNDER_WAY, FrameHeader, PushLink


@dataclass(slots=True)
class PushCounts:
    """Totals of all pushes since the start: acknowledged bytes, and seconds with at least one frame
    in flight.
    """

    num_bytes: int = 0
    busy_s: float = 0.0
    _num_under_way: int = 0
    _busy_since: float = 0.0

    def begin(self, now: float) -> None:
        if not self._num_under_way:
            self._busy_since = now
        self._num_under_way += 1

    def end(self, now: float) -> None:
        self._num_under_way -= 1
        if not self._num_under_way:
            self.busy_s += now - self._busy_since


class KvSender:
    """`run` returns True once the receiver holds the KV that continues the prompt, False after
    `cancel`: of each group of layers, the tokens from `first_sent` on.
    """

    def __init__(
        self,
        placement_id: bytes,
        sequence: Sequence,
        *,
        first_token: int,
        runner: KvPort,
        dial: Callable[[], Awaitable[PushLink]],
        clock: Clock,
        counts: PushCounts,
    ) -> None:
        self._placement_id = placement_id
        self._sequence = sequence
        layout = runner.kv_layout
        # of each group; the last tokens of a bounded one suffice
        self._sent = [
            max(first_token, first_sent(reach, sequence.num_tokens, layout.hash_tokens))
            for reach in layout.reaches
        ]
        self._runner = runner
        self._dial = dial
        self._clock = clock
        self._counts = counts
        self._num_computed_tokens = 0
        self._num_frames = 0
        self._changed = asyncio.Event()
        self._is_cancelled = False
        self._sends: list[asyncio.Task[None]] = []  # of unacknowledged frames, in order

    def computed(self, num_computed_tokens: int) -> None:
        """Records that KV of the first `num_computed_tokens` is in the cache."""
        self._num_computed_tokens = num_computed_tokens
        self._changed.set()

    def cancel(self) -> None:
        self._is_cancelled = True
        self._changed.set()
        for send in self._sends:
            send.cancel()

    async def run(self) -> bool:
        """Raises LinkLost or FrameRefused. No copy reads the blocks after `run` has ended."""
        try:
            while min(self._sent) < self._sequence.num_tokens and not self._is_cancelled:
                if min(self._sent) < self._num_computed_tokens:
                    await self._send_frame()
                else:
                    self._changed.clear()
                    await self._changed.wait()
            await self._settle(0)
        finally:
            for send in self._sends:
                send.cancel()
            await asyncio.gather(*self._sends, return_exceptions=True)
        return not self._is_cancelled

    async def _send_frame(self) -> None:
        link = await self._dial()
        await self._settle(FRAMES_UNDER_WAY - 1)
        if self._is_cancelled:
            return
        header = self._next_header()
        self._sends.append(asyncio.create_task(self._send(link, header)))
        self._sent[header.group] += header.num_tokens
        self._num_frames += 1

    async def _send(self, link: PushLink, header: FrameHeader) -> None:
        self._counts.begin(self._clock.now())
        try:
            await link.send(header, self._fill(header))
            self._counts.num_bytes += header.payload_bytes
        finally:
            self._counts.end(self._clock.now())

    async def _settle(self, max_under_way: int) -> None:
        """Waits until at most `max_under_way` frames are unacknowledged. Raises the error of the
        first failed frame.
        """
        while len(self._sends) > max_under_way and not self._is_cancelled:
            await asyncio.wait(self._sends, return_when=asyncio.FIRST_COMPLETED)
            ended = [send for send in self._sends if send.done()]
            self._sends = [send for send in self._sends if not send.done()]
            errors = [send.exception() for send in ended if not send.cancelled()]
            for error in errors:
                if error is not None and not self._is_cancelled:
                    raise error

    def _next_header(self) -> FrameHeader:
        """The next tokens of the group that is furthest behind."""
        kv_layout = self._runner.kv_layout
        first_token = min(self._sent)
        group = self._sent.index(first_token)
        token_bytes = kv_layout.group_bytes_per_token(group)
        per_frame = max(1, FRAME_BYTES // token_bytes)
        num_tokens = min(per_frame, self._num_computed_tokens - first_token)
        return FrameHeader(
            placement_id=self._placement_id,
            sequence_number=self._num_frames,
            first_token=first_token,
            num_tokens=num_tokens,
            first_layer=0,
            num_layers=len(kv_layout.groups[group].layers),
            first_head=0,
            num_heads=kv_layout.state.row[1],
            kv_format=kv_layout.key,
            group=group,
            num_cached_tokens=self._sequence.num_cached_tokens,
            payload_bytes=num_tokens * token_bytes,
            numerics=self._runner.numerics,
        )

    def _fill(self, header: FrameHeader) -> Callable[[memoryview], Awaitable[None]]:
        table = self._sequence.block_tables[header.group]
        span = header.first_token, header.num_tokens
        return lambda view: self._runner.read_kv(table, *span, view, header.group)
