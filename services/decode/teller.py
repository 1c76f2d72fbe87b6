"""When the tokens that the emitter holds are sent to their gateways.

The steps of a large model take 5 ms and more: what each of them drew leaves at once. Those of a
small one take less than a message costs the bus, the gateway and the client, so what several drew
within a millisecond leaves together. A first token waits for nothing.
"""

from __future__ import annotations

import asyncio
from math import inf

from shared.engine.worker import Worker
from shared.messages import TokenBatch
from shared.subjects import tokens

from .emitter import Emitter, apart

INTERVAL_S = 0.001


class Teller:
    def __init__(self, worker: Worker, emitter: Emitter) -> None:
        self._worker = worker
        self._emitter = emitter
        self._told_at = -inf
        self._has_news = asyncio.Event()

    def step_ended(self, *, has_first: bool) -> None:
        """`has_first`: the step drew the first token of a choice."""
        if has_first or self._worker.clock.now() - self._told_at >= INTERVAL_S:
            self.tell()
        else:
            self._has_news.set()

    def tell(self) -> None:
        worker = self._worker
        self._told_at = worker.clock.now()
        self._has_news.clear()
        for gateway_id, entries in self._emitter.take().items():
            for part in apart(entries):
                batch = TokenBatch(worker_id=worker.worker_id, entries=tuple(part))
                worker.outbox.post(tokens(gateway_id), batch)

    async def run(self) -> None:
        """Tells what no later step told in time."""
        while True:
            await self._has_news.wait()
            told_at = self._told_at
            await self._worker.clock.sleep(told_at + INTERVAL_S - self._worker.clock.now())
            if told_at == self._told_at:
                self.tell()
