"""Receives the prompt's KV from a prefill worker, trying one candidate after the other.

requesting ──accepted──▶ receiving ──all frames──▶ complete
   └─rejected, timeout, worker lost──┴─link lost, bad frame, worker lost, failed──▶ next candidate
no candidate left: decode computes the rest locally, from the last full block received
cancel(): ends once no frame is being copied
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from services.decode.kv_writer import KvWriter
from shared.engine.batching.sequence import Sequence
from shared.engine.runner import KvPort
from shared.errors import HearthError
from shared.kv_wire.link import KvReceiver
from shared.randomness import Randomness

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HandoffResult:
    """The number of tokens whose KV is held, and the prefill worker that sent it."""

    num_held_tokens: int
    prefill_worker_id: str | None = None
    num_pushed_tokens: int = 0
    num_cached_tokens: int = 0


class Handoff:
    """Uses a new placement id per attempt, so that late frames of earlier attempts are rejected."""

    def __init__(
        self,
        sequence: Sequence,
        candidates: tuple[str, ...],
        *,
        runner: KvPort,
        receiver: KvReceiver,
        randomness: Randomness,
        request_prefill: Callable[[str, bytes, int], Awaitable[object]],
        abandon: Callable[[str, bytes], None],
    ) -> None:
        """`request_prefill(worker_id, placement_id, first_token)` sends RunPrefill, or raises;
        `abandon(worker_id, placement_id)` aborts the prefill on a worker.
        """
        self.current: tuple[str, bytes] | None = None  # worker and placement id of this attempt
        self.lease: tuple[str, bytes] | None = None  # `current` once accepted
        self.is_cancelled = False
        self._sequence = sequence
        self._candidates = candidates
        self._runner = runner
        self._receiver = receiver
        self._randomness = randomness
        self._request_prefill = request_prefill
        self._abandon = abandon
        self._receipt: KvWriter | None = None

    def cancel(self) -> None:
        self.is_cancelled = True
        self.fail("cancelled")

    def fail(self, reason: str) -> None:
        """Ends the current attempt."""
        if self._receipt is not None:
            self._receipt.fail(reason)

    async def run(self) -> HandoffResult:
        num_cached = num_held = self._sequence.num_computed_tokens
        for worker_id in self._candidates:
            if self.is_cancelled:
                break
            kv_writer = await self._try(worker_id, num_held)
            if kv_writer.is_complete:
                pushed = kv_writer.num_held_tokens - num_cached
                return HandoffResult(
                    kv_writer.num_held_tokens, worker_id, pushed, kv_writer.num_cached_tokens
                )
            num_held = self._full_blocks(kv_writer.num_held_tokens)
        return HandoffResult(num_held, num_pushed_tokens=num_held - num_cached)

    async def _try(self, worker_id: str, num_held_tokens: int) -> KvWriter:
        placement_id = self._randomness.bytes(16)
        kv_writer = KvWriter(self._sequence, self._runner, num_held_tokens=num_held_tokens)
        self._receipt, self.current = kv_writer, (worker_id, placement_id)
        self._receiver.expect(placement_id, kv_writer)
        reason: str | None
        try:
            reason = await self._received(
                kv_writer, self._request_prefill(worker_id, placement_id, num_held_tokens)
            )
        except HearthError as error:
            reason = error.message
        finally:
            self._receiver.forget(placement_id)
            await self._receiver.idle(placement_id)
            self._receipt = self.current = self.lease = None
        if reason is not None:
            log.warning("prefill_attempt_failed", prefill=worker_id, reason=reason)
            self._abandon(worker_id, placement_id)
        return kv_writer

    async def _received(self, kv_writer: KvWriter, request: Awaitable[object]) -> str | None:
        """Returns how the attempt ended. Raises the HearthError of a rejected request.

        A worker can be lost long before its reply times out, so the end is not awaited after it.
        """
        accepting = asyncio.ensure_future(request)
        try:
            await asyncio.wait((accepting, kv_writer.ended), return_when=asyncio.FIRST_COMPLETED)
            if accepting.done():
                accepting.result()
                self.lease = self.current
            return await kv_writer.ended
        finally:
            accepting.cancel()

    def _full_blocks(self, num_tokens: int) -> int:
        size = self._runner.kv_layout.block_size
        return num_tokens // size * size
