"""Pushes the KV of one prefill to its decode worker while later chunks still compute.

waiting for tokens ──computed()──▶ reading KV ──▶ sending ──acknowledged──▶ waiting, or done
every state ──cancel()──▶ ended, as soon as no copy reads the blocks
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shared.engine.runner import Runner
from shared.engine.sequence import Sequence
from shared.kv_wire.link import FrameHeader, PushLink

FRAME_BYTES = 4 * 1024 * 1024


class Push:
    """`run` returns True when the receiver holds KV of all tokens, False after `cancel`."""

    def __init__(
        self,
        placement_id: bytes,
        sequence: Sequence,
        *,
        first_token: int,
        runner: Runner,
        dial: Callable[[], Awaitable[PushLink]],
    ) -> None:
        self._placement_id = placement_id
        self._sequence = sequence
        self._num_pushed_tokens = first_token
        self._runner = runner
        self._dial = dial
        self._num_computed_tokens = 0
        self._num_frames = 0
        self._changed = asyncio.Event()
        self._is_cancelled = False
        self._send: asyncio.Task[None] | None = None
        self._read: asyncio.Future[None] | None = None

    def computed(self, num_computed_tokens: int) -> None:
        """KV of the first `num_computed_tokens` is in the cache."""
        self._num_computed_tokens = num_computed_tokens
        self._changed.set()

    def cancel(self) -> None:
        self._is_cancelled = True
        self._changed.set()
        if self._send is not None:
            self._send.cancel()

    async def run(self) -> bool:
        """Raises LinkLost or FrameRefused."""
        link = None
        while self._num_pushed_tokens < self._sequence.num_tokens:
            await self._changed.wait()
            self._changed.clear()
            while not self._is_cancelled and self._num_pushed_tokens < self._num_computed_tokens:
                link = link or await self._dial()
                await self._push_frame(link)
            if self._is_cancelled:
                return False
        return True

    async def _push_frame(self, link: PushLink) -> None:
        header = self._next_header()
        self._send = asyncio.create_task(link.send(header, self._fill(header)))
        try:
            await self._send
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
        finally:
            self._send = None
            if self._read is not None:  # a copy that has begun still reads the blocks
                await asyncio.wait([self._read])
        self._num_pushed_tokens += header.num_tokens
        self._num_frames += 1

    def _next_header(self) -> FrameHeader:
        kv_format = self._runner.kv_format
        per_frame = max(1, FRAME_BYTES // kv_format.bytes_per_token)
        num_tokens = min(per_frame, self._num_computed_tokens - self._num_pushed_tokens)
        return FrameHeader(
            placement_id=self._placement_id,
            sequence_number=self._num_frames,
            first_token=self._num_pushed_tokens,
            num_tokens=num_tokens,
            first_layer=0,
            num_layers=kv_format.num_layers,
            first_head=0,
            num_heads=kv_format.num_kv_heads,
            kv_format=kv_format.key,
            num_cached_tokens=self._sequence.num_cached_tokens,
            payload_bytes=num_tokens * kv_format.bytes_per_token,
        )

    def _fill(self, header: FrameHeader) -> Callable[[memoryview], Awaitable[None]]:
        async def fill(view: memoryview) -> None:
            reading = self._runner.read_kv(
                self._sequence.block_table, header.first_token, header.num_tokens, view
            )
            self._read = asyncio.ensure_future(reading)
            try:
                await asyncio.shield(self._read)
            finally:
                if self._read.done():
                    self._read = None

        return fill
