"""Has the grammars of requests planned and tried by processes of a pool.

unknown ──▶ checking, in a process of the pool ──▶ verdict, cached by tenant, model and request

A tenant's verdicts are its own: a fast answer would tell one that another uses the same grammar.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.structured.grammars.tenant_cache import Bounds, TenantCache
from services.gateway.text.process_jobs import Checked, CheckJob, JobRejected, ProcessSetup
from shared.background import start_awaited

CHECK_PROCESS = "services.gateway.structured.grammars.check_process"
CHECK_NICENESS = 5  # more than the gateway's, which streams to everybody
MAX_VERDICTS = Bounds(4096, 32 << 20)
MAX_TENANT_VERDICTS = Bounds(1024, 8 << 20)
MAX_WAIT_S = 0.5  # seconds until a process is free

Verdict = Checked | JobRejected
Place = tuple[str, bytes]  # tenant and digest


class GrammarChecks:
    def __init__(
        self,
        pool: PreparationPool,
        *,
        bounds: Bounds = MAX_VERDICTS,
        of_tenant: Bounds = MAX_TENANT_VERDICTS,
    ) -> None:
        """`bounds`, `of_tenant`: the verdicts that are retained, of all tenants and of one."""
        self._pool = pool
        self._running: dict[Place, asyncio.Task[Verdict]] = {}
        self._verdicts: TenantCache[Verdict] = TenantCache(bounds, of_tenant=of_tenant)

    async def check(self, request: bytes, tenant_id: str, setup: ProcessSetup) -> Verdict:
        """Returns the verdict. `request`: an encoded `GrammarRequest`; `setup`: its model's. Raises
        Overloaded if no process is free in time, and NoCapacity.
        """
        key = blake2b(request, digest_size=16, key=setup.key.encode()).digest()
        known = self._verdicts.get(tenant_id, key)
        if known is not None:
            return known
        place = (tenant_id, key)
        running = self._running.get(place)
        if running is None:
            running = start_awaited(self._run(tenant_id, setup, key, request))
            self._running[place] = running
            running.add_done_callback(lambda _: self._running.pop(place))
        # A client that leaves does not end the check: that would end its process, too.
        return await asyncio.shield(running)

    async def close(self) -> None:
        await self._pool.close()  # fails what runs

    async def _run(
        self, tenant_id: str, setup: ProcessSetup, key: bytes, request: bytes
    ) -> Verdict:
        reply = await self._pool.run(tenant_id, setup, CheckJob(request))
        assert isinstance(reply, Checked | JobRejected), "the reply to a CheckJob"
        num_bytes = len(reply.plan) if isinstance(reply, Checked) else len(reply.reason)
        self._verdicts.put(tenant_id, key, reply, num_bytes)
        return reply
