"""Decides when buffered tokens are sent to their gateways.

A step of a large model takes 5 ms or more: its tokens are sent at once. A step of a small model
takes less time than its tokens cost worker, bus, gateway and client, about 10 us per entry of a
message; so tokens sampled within 2 ms are sent together, which is still faster than a person reads,
and with more running sequences, the tokens of more steps are. A first token is sent immediately,
without the others, and so is all that is left once no choice is unfinished.
"""

from __future__ import annotations

import asyncio
from math import inf

from shared.engine.worker import EngineWorker
from shared.messages import TokenBatch
from shared.output.output_buffer import Batches, OutputBuffer, apart
from shared.subjects import tokens

INTERVAL_S = 0.002
ENTRY_INTERVAL_S = 20e-6  # interval per waiting entry, if the sum is longer


class TokenFlusher:
    def __init__(self, worker: EngineWorker, output_buffer: OutputBuffer) -> None:
        self._worker = worker
        self._output_buffer = output_buffer
        self._flushed_at = -inf
        self._has_updates = asyncio.Event()

    def step_ended(self, *, is_idle: bool) -> None:
        """Sends waiting updates if they are due, or if the engine `is_idle`: no further step will
        sample a token.
        """
        if is_idle or self._worker.clock.now() >= self._due_at():
            self.flush()
        else:
            self._send(self._output_buffer.take_first())
            if self._output_buffer.num_waiting:
                self._has_updates.set()

    def flush(self) -> None:
        self._has_updates.clear()
        if not self._output_buffer.num_waiting:
            return
        self._flushed_at = self._worker.clock.now()
        self._send(self._output_buffer.take())

    async def run(self) -> None:
        """Flushes tokens that no later step has flushed when they are due."""
        while True:
            await self._has_updates.wait()
            flushed_at = self._flushed_at
            await self._worker.clock.sleep(self._due_at() - self._worker.clock.now())
            if flushed_at == self._flushed_at:
                self.flush()

    def _due_at(self) -> float:
        return self._flushed_at + max(
            INTERVAL_S, self._output_buffer.num_waiting * ENTRY_INTERVAL_S
        )

    def _send(self, batches: Batches) -> None:
        for (gateway_id, region_class), entries in batches.items():
            for part in apart(entries):
                batch = TokenBatch(
                    worker_id=self._worker.worker_id,
                    entries=tuple(part),
                    region_class=region_class,
                )
                self._worker.outbox.post(tokens(gateway_id), batch)
