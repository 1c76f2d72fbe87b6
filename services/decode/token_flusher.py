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
    def __init__(self, worker: EngineWorker, emitter: OutputBuffer) -> None:
        self._worker = worker
        self._emitter = emitter
        self._told_at = -inf
        self._has_news = asyncio.Event()

    def step_ended(self) -> None:
        if self._worker.clock.now() >= self._due_at():
            self.tell()
        else:
            self._send(self._emitter.take_first())
            if self._emitter.num_waiting:
                self._has_news.set()

    def tell(self) -> None:
        self._has_news.clear()
        if not self._emitter.num_waiting:
            return
        self._told_at = self._worker.clock.now()
        self._send(self._emitter.take())

    async def run(self) -> None:
        """Tells what no later step told in time."""
        while True:
            await self._has_news.wait()
            told_at = self._told_at
            await self._worker.clock.sleep(self._due_at() - self._worker.clock.now())
            if told_at == self._told_at:
                self.tell()

    def _due_at(self) -> float:
        return self._told_at + max(INTERVAL_S, self._emitter.num_waiting * ENTRY_INTERVAL_S)

    def _send(self, batches: dict[str, list[TokenEntry]]) -> None:
        for gateway_id, entries in batches.items():
            for part in apart(entries):
                batch = TokenBatch(worker_id=self._worker.worker_id, entries=tuple(part))
                self._worker.outbox.post(tokens(gateway_id), batch)
