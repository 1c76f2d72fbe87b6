"""Receives the KV frames of one prefill attempt and writes them into the reserved blocks."""

from __future__ import annotations

import asyncio

from shared.engine.batching.sequence import Sequence
from shared.engine.runner import Runner
from shared.errors import FrameRefused
from shared.kv_wire.link import FrameHeader


class KvWriter:
    """A FrameSink. KV arrives in token order; KV of the first `num_held_tokens` is written.

    `ended` resolves to None once all KV is written, or to the reason of the failure.
    """

    def __init__(self, sequence: Sequence, runner: Runner, *, num_held_tokens: int) -> None:
        self.num_held_tokens = num_held_tokens
        self.num_cached_tokens = 0
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._sequence = sequence
        self._runner = runner
        self._num_expected_tokens = sequence.num_prefill_tokens
        self._num_taken_tokens = num_held_tokens  # includes tokens being written

    @property
    def is_complete(self) -> bool:
        return self.num_held_tokens == self._num_expected_tokens

    async def frame(self, header: FrameHeader, payload: memoryview) -> None:
        self._check(header)
        self._num_taken_tokens += header.num_tokens
        await self._runner.write_kv(
            self._sequence.block_table, header.first_token, header.num_tokens, payload
        )
        self.num_held_tokens += header.num_tokens
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
        kv_layout = self._runner.kv_layout
        is_next = header.first_token == self._num_taken_tokens and header.num_tokens > 0
        fits = header.first_token + header.num_tokens <= self._num_expected_tokens
        is_full = (header.first_layer, header.num_layers) == (0, kv_layout.num_layers) and (
            header.first_head,
            header.num_heads,
        ) == (0, kv_layout.state.row[1])
        has_bytes = header.payload_bytes == header.num_tokens * kv_layout.bytes_per_token
        is_same_format = header.kv_format == kv_layout.key
        if not self._runner.numerics.may_share_kv(header.numerics):
            raise FrameRefused(f"KV of {header.numerics} is not that of {self._runner.numerics}")
        if self.ended.done() or not (is_next and fits and is_full and has_bytes and is_same_format):
            raise FrameRefused(
                f"frame of tokens {header.first_token}+{header.num_tokens} in {header.kv_format} "
                f"does not continue {self._num_taken_tokens} of {self._num_expected_tokens} tokens"
            )
