"""Receives the KV frames of one prefill attempt and writes them into the reserved blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from typing import Protocol

from shared.engine.step import KvMemory, KvRun
from shared.errors import FrameRefused, KvMismatch
from shared.kv_layout import KvShard, first_sent
from shared.kv_wire.coverage import Coverage
from shared.kv_wire.link import OUTSIDE_REGIONS, FrameHeader
from shared.kv_wire.shards import in_groups


class ReservedSequence(Protocol):
    """The state of a sequence that a writer reads: its reserved blocks, and the tokens
    to receive.
    """

    @property
    def num_prefill_tokens(self) -> int: ...

    @property
    def is_zero_retention(self) -> bool: ...

    @property
    def block_tables(self) -> Seq[Seq[int]]: ...


class KvWriter:
    """A FrameSink. The KV of each group of layers arrives in token order, of a bounded group from
    `first_sent` on; that of the first `num_held_tokens` is written. Several senders may each push
    a part of `shard`, by the layers of the model; None: the whole.

    `ended` resolves to None once all KV is written, or to the reason of the failure.
    """

    def __init__(
        self,
        sequence: ReservedSequence,
        memory: KvMemory,
        *,
        num_held_tokens: int,
        shard: KvShard | None = None,
    ) -> None:
        self.num_cached_tokens = 0
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._sequence = sequence
        self._memory = memory
        self._num_expected_tokens = end = sequence.num_prefill_tokens
        layout = memory.kv_layout
        shards = in_groups(layout, layout.whole if shard is None else shard)
        self._wholes = in_groups(layout, layout.whole)
        self._coverages = [
            Coverage(
                shard,
                first_token=max(num_held_tokens, first_sent(reach, end, layout.hash_tokens)),
                end=end,
            )
            for shard, reach in zip(shards, layout.reaches, strict=True)
        ]
        if self.is_complete:
            self._end(None)

    @property
    def num_held_tokens(self) -> int:
        return min(each.num_held_tokens for each in self._coverages)

    @property
    def is_complete(self) -> bool:
        return self.num_held_tokens == self._num_expected_tokens

    async def frame(self, header: FrameHeader, payload: memoryview) -> None:
        part = header.shard
        self._check(header, part)
        group, num_tokens = header.group, header.num_tokens
        coverage = self._coverages[group]
        first_token = coverage.take(part, num_tokens)
        table = self._sequence.block_tables[group]
        shard = None if part == self._wholes[group] else part
        run = KvRun(table, header.first_token, num_tokens, group, shard)
        await self._memory.write_kv(run, payload)
        coverage.hold(part, first_token)
        self.num_cached_tokens = header.num_cached_tokens
        if self.is_complete:
            self._end(None)

    def corrupt(self, header: FrameHeader) -> None:
        self._end(f"frame {header.sequence_number} fails its checksum")

    def outside(self) -> None:
        self._end(OUTSIDE_REGIONS)

    def link_lost(self) -> None:
        self._end("the link is lost")

    def fail(self, reason: str) -> None:
        self._end(reason)

    def _end(self, reason: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    def _check(self, header: FrameHeader, part: KvShard) -> None:
        """Checks a frame. Raises FrameRefused unless the frame has the next tokens of a part, and
        the agreed format and numerics.
        """
        layout, group = self._memory.kv_layout, header.group
        if not 0 <= group < len(layout.groups):
            raise FrameRefused(f"group {group} is not one of {len(layout.groups)}")
        if not self._memory.numerics.may_share_kv(header.numerics):
            raise KvMismatch(f"KV of {header.numerics} is not that of {self._memory.numerics}")
        if header.kv_format != layout.key:
            raise KvMismatch(f"KV in {header.kv_format} is not in {layout.key}")
        next_token = self._coverages[group].next_token(part)
        is_next = header.first_token == next_token and header.num_tokens > 0
        fits = header.first_token + header.num_tokens <= self._num_expected_tokens
        num_bytes = header.num_tokens * part.num_cells * layout.cell_bytes
        has_bytes = header.payload_bytes == num_bytes
        if self.ended.done() or not (is_next and fits and has_bytes):
            raise FrameRefused(
                f"frame of tokens {header.first_token}+{header.num_tokens} "
                f"of group {group}, layers {header.first_layer}+{header.num_layers}, heads "
                f"{header.first_head}+{header.num_heads} does not continue {next_token} of "
                f"{self._num_expected_tokens} tokens"
            )
