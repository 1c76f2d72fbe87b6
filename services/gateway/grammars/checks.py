"""Whether a client's grammar compiles and advances fast enough, tried before it is sent to workers.

unknown ──▶ checking, in a process of the pool ──▶ verdict, cached by the grammar's digest
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

from services.gateway.grammars.grammar import Grammar
from services.gateway.text.preparation_pool import PreparationPool
from services.gateway.text.process_jobs import Checked, CheckJob, Rejected

CHECK_PROCESS = "services.gateway.grammars.check_process"
MAX_VERDICTS = 4096
MAX_CACHED_CHARS = 16 * 1024  # of a verdict's source
MAX_WAIT_S = 0.5  # for a process

Verdict = Checked | Rejected


class GrammarChecks:
    def __init__(self, pool: PreparationPool) -> None:
        self._pool = pool
        self._running: dict[tuple[str, bytes], asyncio.Task[Verdict]] = {}
        self._verdicts: dict[bytes, Verdict] = {}  # the least recently used first

    async def check(self, grammar: Grammar, tenant_id: str) -> Verdict:
        """Raises Overloaded if no process is free in time; NoCapacity."""
        key = blake2b(f"{grammar.kind}\0{grammar.source}".encode(), digest_size=16).digest()
        known = self._verdicts.pop(key, None)
        if known is not None:
            self._verdicts[key] = known
            return known
        place = (tenant_id, key)
        running = self._running.get(place)
        if running is None:
            running = asyncio.create_task(self._run(tenant_id, key, grammar))
            self._running[place] = running
            running.add_done_callback(lambda task: self._ended(place, task))
        # A client that leaves does not end the check: that would end its process, too.
        return await asyncio.shield(running)

    async def close(self) -> None:
        await self._pool.close()  # fails what runs

    async def _run(self, tenant_id: str, key: bytes, grammar: Grammar) -> Verdict:
        reply = await self._pool.run(tenant_id, CheckJob(grammar.kind, grammar.source))
        assert isinstance(reply, Checked | Rejected), "the reply to a CheckJob"
        self._retain(key, reply)
        return reply

    def _ended(self, place: tuple[str, bytes], task: asyncio.Task[Verdict]) -> None:
        del self._running[place]
        if not task.cancelled():
            task.exception()  # also if every client has left

    def _retain(self, key: bytes, verdict: Verdict) -> None:
        if isinstance(verdict, Checked) and len(verdict.source) > MAX_CACHED_CHARS:
            return
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]
