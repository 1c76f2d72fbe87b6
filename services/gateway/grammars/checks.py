"""Whether a client's grammar compiles and advances fast enough, tried before it is sent to workers.

    unknown ──▶ checking, in a process of the pool ──▶ verdict, cached by the grammar's digest
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

from services.gateway.grammars.constraint_grammar import Grammar
from services.gateway.text.preparation_pool import PreparationPool
from services.gateway.text.process_jobs import CHECK_TIMEOUT, CheckJob, Checked, Rejected
from shared.errors import GrammarTooComplex, Overloaded

CHECK_PROCESS = "services.gateway.grammars.check_process"
MAX_VERDICTS = 4096
MAX_CACHED_CHARS = 16 * 1024  # of a verdict's source
MAX_WAIT_S = 0.5  # for a process
MAX_CHECK_S = 1.4  # with that wait

Verdict = Checked | Rejected


class GrammarChecks:
    def __init__(self, pool: PreparationPool) -> None:
        self._pool = pool
        self._verdicts: dict[bytes, Verdict] = {}  # the least recently used first

    async def check(self, grammar: Grammar, tenant_id: str) -> Verdict:
        """Answers within `MAX_CHECK_S`. Raises Overloaded, NoCapacity."""
        key = blake2b(f"{grammar.kind}\0{grammar.source}".encode(), digest_size=16).digest()
        known = self._verdicts.pop(key, None)
        if known is not None:
            self._verdicts[key] = known
            return known
        job = CheckJob(grammar.kind, grammar.source)
        try:
            async with asyncio.timeout(MAX_CHECK_S):
                reply = await self._pool.run(tenant_id, job)
        except TimeoutError:  # not retained: the machine may have been busy
            return Rejected(CHECK_TIMEOUT, None, GrammarTooComplex.code)
        assert isinstance(reply, Checked | Rejected), "the reply to a CheckJob"
        self._retain(key, reply)
        return reply

    async def close(self) -> None:
        await self._pool.close()

    def _retain(self, key: bytes, verdict: Verdict) -> None:
        if isinstance(verdict, Checked) and len(verdict.source) > MAX_CACHED_CHARS:
            return
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]
