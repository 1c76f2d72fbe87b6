"""Pushes the KV of one prefill to one process of its decode worker, while later chunks are still
computed.

waiting for tokens ──computed()──▶ sending, some frames in flight ──all acknowledged──▶ done
every state ──cancel()──▶ ended, as soon as no copy reads the blocks
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from shared.background import start_awaited
from shared.clock import Clock
from shared.engine.step import KvMemory, KvRun
from shared.errors import OutsideRegions
from shared.kv_layout import KvShard, first_sent
from shared.kv_wire.link import FrameHeader, PushBounds, PushLink, PushPlan
from shared.kv_wire.shards import in_groups, parts_of_groups


@dataclass(slots=True)
class PushCounts:
    """Totals of all pushes since the start: acknowledged bytes, and seconds with at least one frame
    in flight. A token is what all targets of a push take of it: its parts are fractions.
    """

    num_bytes: int = 0
    num_tokens: float = 0.0
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


class PushedSequence(Protocol):
    """The state of a prefill that a sender reads: its blocks, and the tokens of the
    cached prefix.
    """

    @property
    def tenant_id(self) -> str: ...

    @property
    def is_zero_retention(self) -> bool: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def block_tables(self) -> Seq[Seq[int]]: ...


class KvSender:
    """Sends a prompt's KV. `run` returns True once the receiver holds the KV that continues the
    prompt, and False after `cancel`. It sends the tokens from `first_sent` on, of each group of
    layers. `memory` has, and the receiver takes, the part `shard` of the model's layers; None: the
    whole.
    """

    def __init__(
        self,
        placement_id: bytes,
        sequence: PushedSequence,
        *,
        first_token: int,
        memory: KvMemory,
        dial: Callable[[], Awaitable[PushLink]],
        clock: Clock,
        counts: PushCounts,
        shard: KvShard | None = None,
        num_target_cells: int | None = None,
        bounds: PushBounds | None = None,
    ) -> None:
        """Prepares a push. `num_target_cells` counts the layers × heads that all its targets take,
        this sender's and others'; None: those of the model. With `bounds` nothing is sent over a
        link that they do not allow, or before the receiver has accepted the push.
        """
        self._bounds = bounds
        self._open_link: PushLink | None = None  # the last one that may take frames
        self._link: PushLink | None = None  # the last one
        self.plan: PushPlan | None = None  # of the first link, before its first frame
        self._placement_id = placement_id
        self._sequence = sequence
        layout = memory.kv_layout
        if num_target_cells is None:
            num_target_cells = layout.whole.num_cells
        self._shards = in_groups(layout, layout.whole if shard is None else shard)
        self._shares = [each.num_cells / num_target_cells for each in self._shards]
        self._parts = parts_of_groups(layout, self._shards)
        # First token to send of each group; the last tokens of a bounded one suffice.
        self._sent = [
            max(first_token, first_sent(reach, sequence.num_tokens, layout.hash_tokens))
            if shard.num_cells
            else sequence.num_tokens
            for shard, reach in zip(self._shards, layout.reaches, strict=True)
        ]
        self._memory = memory
        self._dial = dial
        self._clock = clock
        self._counts = counts
        self._num_computed_tokens = 0
        self._num_frames = 0
        self._own = PushCounts()
        self._changed = asyncio.Event()
        self._is_cancelled = False
        self._sends: list[asyncio.Task[None]] = []  # unacknowledged frames, in order
        self._offer: asyncio.Task[None] | None = None  # the last one

    @property
    def num_bytes(self) -> int:
        return self._own.num_bytes

    @property
    def link_s(self) -> float:
        return self._own.busy_s

    def computed(self, num_computed_tokens: int) -> None:
        """Records that KV of the first `num_computed_tokens` is in the cache."""
        self._num_computed_tokens = num_computed_tokens
        self._changed.set()

    def cancel(self) -> None:
        self._is_cancelled = True
        self._changed.set()
        for send in self._sends:
            send.cancel()
        if self._offer is not None:
            self._offer.cancel()

    async def run(self) -> bool:
        """Runs the push. Raises LinkLost, FrameRefused, or OutsideRegions. No copy reads the blocks
        after `run` has ended.
        """
        try:
            while min(self._sent) < self._sequence.num_tokens and not self._is_cancelled:
                if min(self._sent) < self._num_computed_tokens:
                    await self._send_frame()
                else:
                    self._changed.clear()
                    await self._changed.wait()
            await self._settle(0)
            if self._link is not None and not self._is_cancelled:
                self._link.observe(self.num_bytes, self.link_s)
        finally:
            for send in self._sends:
                send.cancel()
            await asyncio.gather(*self._sends, return_exceptions=True)
        return not self._is_cancelled

    async def _send_frame(self) -> None:
        self._link = link = await self._dial()
        self.plan = self.plan or link.plan
        await self._open(link)
        await self._settle(link.frames_under_way - 1)
        if self._is_cancelled:
            return
        header = self._next_header(link.frame_bytes)
        self._sends.append(start_awaited(self._send(link, header)))
        self._sent[header.group] += header.num_tokens
        self._num_frames += 1

    async def _open(self, link: PushLink) -> None:
        """Has a push with bounds accepted, before its first frame on this link."""
        if self._bounds is None or link is self._open_link:
            return
        own, peer = link.regions
        if not self._bounds.allow(own, peer):
            raise OutsideRegions(f"KV from {own!r} to {peer!r}: not between the tenant's regions")
        self._offer = start_awaited(link.offer(self._placement_id))
        try:
            await asyncio.wait((self._offer,))  # a receiver that hangs never answers it
        finally:
            self._offer.cancel()
        if not self._is_cancelled:
            self._offer.result()
            self._open_link = link

    async def _send(self, link: PushLink, header: FrameHeader) -> None:
        every = (self._counts, self._own)
        for counts in every:
            counts.begin(self._clock.now())
        try:
            await link.send(
                header,
                self._fill(header),
                self._sequence.tenant_id,
                is_private=self._sequence.is_zero_retention,
            )
            for counts in every:
                counts.num_bytes += header.payload_bytes
                counts.num_tokens += header.num_tokens * self._shares[header.group]
        finally:
            for counts in every:
                counts.end(self._clock.now())

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

    def _next_header(self, frame_bytes: int) -> FrameHeader:
        """Returns the next tokens of the group that is furthest behind."""
        first_token = min(self._sent)
        group = self._sent.index(first_token)
        shard, layout = self._shards[group], self._memory.kv_layout
        token_bytes = shard.num_cells * layout.cell_bytes
        per_frame = max(1, frame_bytes // token_bytes)
        num_tokens = min(per_frame, self._num_computed_tokens - first_token)
        return FrameHeader(
            placement_id=self._placement_id,
            sequence_number=self._num_frames,
            first_token=first_token,
            num_tokens=num_tokens,
            first_layer=shard.first_layer,
            num_layers=shard.num_layers,
            first_head=shard.first_head,
            num_heads=shard.num_heads,
            kv_format=layout.key,
            group=group,
            num_cached_tokens=self._sequence.num_cached_tokens,
            payload_bytes=num_tokens * token_bytes,
            numerics=self._memory.numerics,
        )

    def _fill(self, header: FrameHeader) -> Callable[[memoryview], Awaitable[None]]:
        table, part = self._sequence.block_tables[header.group], self._parts[header.group]
        run = KvRun(table, header.first_token, header.num_tokens, header.group, part)
        return lambda view: self._memory.read_kv(run, view)
