"""Whether a client's grammar compiles and advances fast enough, tried before it is sent to workers.

unknown ──▶ checking, in a process of the pool ──▶ verdict, cached by tenant and grammar

A tenant's verdicts are its own: a fast answer would tell one that another uses the same grammar.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

from services.gateway.grammars.grammar import Grammar
from services.gateway.text.preparation_pool import PreparationPool
from services.gateway.text.process_jobs import Checked, CheckJob, Rejected

CHECK_PROCESS = "services.gateway.grammars.check_process"
MAX_VERDICTS = 4096
MAX_TENANT_VERDICTS = 1024  # so that no tenant pushes out those of all others
MAX_CACHED_CHARS = 16 * 1024  # of a verdict's source
MAX_WAIT_S = 0.5  # for a process

Verdict = Checked | Rejected
Place = tuple[str, bytes]  # tenant and digest


class GrammarChecks:
    def __init__(self, pool: PreparationPool) -> None:
        self._pool = pool
        self._running: dict[Place, asyncio.Task[Verdict]] = {}
        # The least recently used first: tenants, and the verdicts of each.
        self._verdicts: dict[str, dict[bytes, Verdict]] = {}
        self._num_verdicts = 0

    async def check(self, grammar: Grammar, tenant_id: str) -> Verdict:
        """Raises Overloaded if no process is free in time; NoCapacity."""
        key = blake2b(f"{grammar.kind}\0{grammar.source}".encode(), digest_size=16).digest()
        known = self._known(tenant_id, key)
        if known is not None:
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
        self._retain(tenant_id, key, reply)
        return reply

    def _ended(self, place: Place, task: asyncio.Task[Verdict]) -> None:
        del self._running[place]
        if not task.cancelled():
            task.exception()  # also if every client has left

    def _known(self, tenant_id: str, key: bytes) -> Verdict | None:
        own = self._verdicts.get(tenant_id, {})
        known = own.pop(key, None)
        if known is not None:
            own[key] = known
            self._verdicts[tenant_id] = self._verdicts.pop(tenant_id)
        return known

    def _retain(self, tenant_id: str, key: bytes, verdict: Verdict) -> None:
        if isinstance(verdict, Checked) and len(verdict.source) > MAX_CACHED_CHARS:
            return
        own = self._verdicts[tenant_id] = self._verdicts.pop(tenant_id, {})
        own[key] = verdict
        self._num_verdicts += 1
        if len(own) > MAX_TENANT_VERDICTS:
            self._forget(tenant_id)
        elif self._num_verdicts > MAX_VERDICTS:
            self._forget(next(iter(self._verdicts)))

    def _forget(self, tenant_id: str) -> None:
        own = self._verdicts[tenant_id]
        del own[next(iter(own))]
        self._num_verdicts -= 1
        if not own:
            del self._verdicts[tenant_id]
