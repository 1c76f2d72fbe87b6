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

from shared.background import start_awaited
from shared.engine.batching.sequence import Sequence
from shared.engine.kv.ports import Receipt, ReceivePort
from shared.errors import HearthError
from shared.kv_wire.link import OUTSIDE_REGIONS, PushBounds
from shared.messages import KvPush
from shared.randomness import Randomness

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HandoffResult:
    """The number of tokens whose KV is held, and the prefill worker that sent it, after those of
    `partial_pushes` had failed.
    """

    num_held_tokens: int
    prefill_worker_id: str | None = None
    num_pushed_tokens: int = 0
    num_cached_tokens: int = 0
    partial_pushes: tuple[KvPush, ...] = ()


class Handoff:
    """Uses a new placement id per attempt, so that late frames of earlier attempts are rejected."""

    def __init__(
        self,
        sequence: Sequence,
        candidates: tuple[str, ...],
        *,
        port: ReceivePort,
        block_size: int,
        randomness: Randomness,
        request_prefill: Callable[[str, bytes, int], Awaitable[object]],
        abandon: Callable[[str, bytes], None],
        region_of: Callable[[str], str | None] = lambda worker_id: None,
        regions: frozenset[str] | None = None,
        on_outside: Callable[[str], None] = lambda worker_id: None,
    ) -> None:
        """Calls `request_prefill(worker_id, placement_id, first_token)` to send RunPrefill, which
        may raise, and `abandon(worker_id, placement_id)` to abort the prefill on a worker.
        `regions` may have the KV; `region_of` a worker returns None if it is not known, and
        `on_outside` is called for one whose push comes from elsewhere.
        """
        self._region_of = region_of
        self._regions = regions
        self._on_outside = on_outside
        self.current: tuple[str, bytes] | None = None  # worker and placement id of this attempt
        self.lease: tuple[str, bytes] | None = None  # `current` once accepted
        self.is_cancelled = False
        self.failed_workers: list[str] = []  # one for each failed try
        self._sequence = sequence
        self._candidates = candidates
        self._port = port
        self._block_size = block_size
        self._randomness = randomness
        self._request_prefill = request_prefill
        self._abandon = abandon
        self._receipt: Receipt | None = None

    def cancel(self) -> None:
        self.is_cancelled = True
        self.fail("cancelled")

    def fail(self, reason: str) -> None:
        """Ends the current attempt."""
        if self._receipt is not None:
            self._receipt.fail(reason)

    async def run(self) -> HandoffResult:
        num_cached = num_held = self._sequence.num_computed_tokens
        partial: list[KvPush] = []
        for worker_id in self._candidates:
            if self.is_cancelled:
                break
            receipt = await self._try(worker_id, num_held)
            if receipt.is_complete:
                pushed = receipt.num_held_tokens - num_cached
                return HandoffResult(
                    receipt.num_held_tokens,
                    worker_id,
                    pushed,
                    receipt.num_cached_tokens,
                    partial_pushes=tuple(partial),
                )
            before, num_held = num_held, self._full_blocks(receipt.num_held_tokens)
            if num_held > before:
                partial.append(KvPush(worker_id, num_held - before))
        return HandoffResult(
            num_held, num_pushed_tokens=num_held - num_cached, partial_pushes=tuple(partial)
        )

    async def _try(self, worker_id: str, num_held_tokens: int) -> Receipt:
        placement_id = self._randomness.bytes(16)
        receipt = self._port.expect(
            placement_id,
            self._sequence,
            num_held_tokens=num_held_tokens,
            prefill_worker_id=worker_id,
            prefill_region=self._region_of(worker_id),
            bounds=self._bounds(worker_id),
        )
        self._receipt, self.current = receipt, (worker_id, placement_id)
        reason: str | None
        try:
            await self._port.ready(placement_id)
            reason = await self._received(
                receipt, self._request_prefill(worker_id, placement_id, num_held_tokens)
            )
        except HearthError as error:
            reason = error.message
        finally:
            await self._port.forget(placement_id)
            self._receipt = self.current = self.lease = None
        if reason == OUTSIDE_REGIONS:
            self._on_outside(worker_id)
        if reason is not None:
            if not self.is_cancelled:
                self.failed_workers.append(worker_id)
            log.warning("prefill_attempt_failed", prefill=worker_id, reason=reason)
            self._abandon(worker_id, placement_id)
        return receipt

    def _bounds(self, worker_id: str) -> PushBounds | None:
        if self._regions is None:
            return None
        return PushBounds(self._regions, self._region_of(worker_id) or "")

    async def _received(self, receipt: Receipt, request: Awaitable[object]) -> str | None:
        """Returns how the attempt ended. Raises the HearthError of a rejected request.

        A worker can be lost long before its reply times out, so the end is not awaited after it.
        """
        accepting = start_awaited(request)
        try:
            await asyncio.wait((accepting, receipt.ended), return_when=asyncio.FIRST_COMPLETED)
            if accepting.done():
                accepting.result()
                self.lease = self.current
            return await receipt.ended
        finally:
            accepting.cancel()

    def _full_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._block_size * self._block_size
