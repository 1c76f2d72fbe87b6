"""When the tokens that the emitter holds are sent to their gateways.

The steps of a large model take 5 ms and more: what each of them drew leaves at once. Those of a
small one take less than its telling costs worker, bus, gateway and client, some 10 us for each
entry of a message; so what is drawn within 2 ms leaves together, which is still faster than anybody
reads, and the more sequences run, the more of their steps. A first token waits for nothing, and
leaves without the others.
"""

from __future__ import annotations

import asyncio
from math import inf

from services.decode.output_buffer import OutputBuffer, apart
from shared.engine.worker import EngineWorker
from shared.messages import TokenBatch, TokenEntry
from shared.subjects import tokens

INTERVAL_S = 0.002
ENTRY_INTERVAL_S = 20e-6  # for each entry, if that is more


class TokenFlusher:
    def __init__(self, worker: EngineWorker, output_buffer: OutputBuffer) -> None:
        self._worker = worker
        self._output_buffer = output_buffer
        self._told_at = -inf
        self._has_updates = asyncio.Event()

    def step_ended(self) -> None:
        if self._worker.clock.now() >= self._due_at():
            self.flush()
        else:
            self._send(self._output_buffer.take_first())
            if self._output_buffer.num_waiting:
                self._has_updates.set()

    def flush(self) -> None:
        self._has_updates.clear()
        if not self._output_buffer.num_waiting:
            return
        self._told_at = self._worker.clock.now()
        self._send(self._output_buffer.take())

    async def run(self) -> None:
        """Tells what no later step told in time."""
        while True:
            await self._has_updates.wait()
            flushed_at = self._told_at
            await self._worker.clock.sleep(self._due_at() - self._worker.clock.now())
            if flushed_at == self._told_at:
                self.flush()

    def _due_at(self) -> float:
        return self._told_at + max(INTERVAL_S, self._output_buffer.num_waiting * ENTRY_INTERVAL_S)

    def _send(self, batches: dict[str, list[TokenEntry]]) -> None:
        for gateway_id, entries in batches.items():
            for part in apart(entries):
                batch = TokenBatch(worker_id=self._worker.worker_id, entries=tuple(part))
                self._worker.outbox.post(tokens(gateway_id), batch)
