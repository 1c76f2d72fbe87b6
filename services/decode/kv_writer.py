"""Receives the KV frames of one prefill attempt and writes them into the reserved blocks."""

from __future__ import annotations

import asyncio

from shared.engine.batching.sequence import Sequence
from shared.engine.runner import KvPort
from shared.errors import FrameRefused
from shared.kv_layout import first_sent
from shared.kv_wire.link import FrameHeader


class KvWriter:
    """A FrameSink. The KV of each group of layers arrives in token order, of a bounded group from
    `first_sent` on; that of the first `num_held_tokens` is written.

    `ended` resolves to None once all KV is written, or to the reason of the failure.
    """

    def __init__(self, sequence: Sequence, runner: KvPort, *, num_held_tokens: int) -> None:
        self.num_cached_tokens = 0
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._sequence = sequence
        self._runner = runner
        self._num_expected_tokens = sequence.num_prefill_tokens
        layout = runner.kv_layout
        self._held = [  # by group
            max(
                num_held_tokens,
                first_sent(reach, self._num_expected_tokens, layout.hash_tokens),
            )
            for reach in layout.reaches
        ]
        self._taken = self._held[:]  # includes tokens being written
        if self.is_complete:
            self._end(None)

    @property
    def num_held_tokens(self) -> int:
        return min(self._held)

    @property
    def is_complete(self) -> bool:
        return self.num_held_tokens == self._num_expected_tokens

    async def frame(self, header: FrameHeader, payload: memoryview) -> None:
        self._check(header)
        group, num_tokens = header.group, header.num_tokens
        self._taken[group] += num_tokens
        table = self._sequence.block_tables[group]
        await self._runner.write_kv(table, header.first_token, num_tokens, payload, group)
        self._held[group] += num_tokens
        self.num_cached_tokens = header.num_cached_tokens
        if self.is_complete:
            self._end(None)

    def corrupt(self, header: FrameHeader) -> None:
        self._end(f"frame {header.sequence_number} fails its checksum")

    def link_lost(self) -> None:
        self._end("the link is lost")

    def fail(self, reason: str) -> None:
        self._end(reason)

    def _end(self, reason: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    def _check(self, header: FrameHeader) -> None:
        """Raises FrameRefused unless the frame has the next tokens, all layers and heads, and the
        agreed format and numerics.
        """
        kv_layout, group = self._runner.kv_layout, header.group
        if not 0 <= group < len(kv_layout.groups):
            raise FrameRefused(f"group {group} is not one of {len(kv_layout.groups)}")
        num_layers, num_heads = len(kv_layout.groups[group].layers), kv_layout.state.row[1]
        token_bytes = kv_layout.group_bytes_per_token(group)
        is_next = header.first_token == self._taken[group] and header.num_tokens > 0
        fits = header.first_token + header.num_tokens <= self._num_expected_tokens
        is_full = (header.first_layer, header.num_layers) == (0, num_layers) and (
            header.first_head,
            header.num_heads,
        ) == (0, num_heads)
        has_bytes = header.payload_bytes == header.num_tokens * token_bytes
        is_same_format = header.kv_format == kv_layout.key
        if not self._runner.numerics.may_share_kv(header.numerics):
            raise FrameRefused(f"KV of {header.numerics} is not that of {self._runner.numerics}")
        if self.ended.done() or not (is_next and fits and is_full and has_bytes and is_same_format):
            raise FrameRefused(
                f"frame of tokens {header.first_token}+{header.num_tokens} in {header.kv_format} "
                f"of group {group} does not continue {self._taken[group]} of "
                f"{self._num_expected_tokens} tokens"
            )
