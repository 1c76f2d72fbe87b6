"""Plans and tries the grammars of requests in processes of a pool.

unknown ──▶ checking, in a process of the pool ──▶ verdict, cached by tenant, model and request

Tenants do not share verdicts: a fast answer would reveal that another tenant uses the same grammar.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.structured.grammars.tenant_cache import Bounds, TenantCache
from services.gateway.text.process_jobs import Checked, CheckJob, JobRejected, ProcessSetup
from shared.background import start_awaited

CHECK_PROCESS = "services.gateway.structured.grammars.check_process"
CHECK_NICENESS = 5  # lower priority than the gateway's streams
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
        """`bounds` limit the retained verdicts, `of_tenant` those of one tenant."""
        self._pool = pool
        self._num_forgotten = 0
        self._running: dict[Place, asyncio.Task[Verdict]] = {}
        self._verdicts: TenantCache[Verdict] = TenantCache(bounds, of_tenant=of_tenant)

    async def check(
        self, request: bytes, tenant_id: str, setup: ProcessSetup, *, is_retained: bool = True
    ) -> Verdict:
        """Returns the verdict on `request`, an encoded `GrammarRequest` for the model of `setup`.
        One that is not retained is forgotten then: it has the client's schema. Raises NoCapacity,
        and Overloaded if no process becomes free in time.
        """
        if not is_retained:
            self._verdicts.remove_tenant(tenant_id)  # those before it was switched on
        key = blake2b(request, digest_size=16, key=setup.key.encode()).digest()
        known = self._verdicts.get(tenant_id, key) if is_retained else None
        if known is not None:
            return known
        place = (tenant_id, key)
        running = self._running.get(place)
        if running is None:
            running = start_awaited(
                self._run(tenant_id, setup, key, request, is_retained=is_retained)
            )
            self._running[place] = running
            running.add_done_callback(lambda _: self._running.pop(place))
        # A client that disconnects does not end the check: that would end its process too.
        return await asyncio.shield(running)

    def forget(self, tenant_id: str) -> None:
        """Forgets the verdicts of a tenant, also of checks that run."""
        self._num_forgotten += 1
        self._verdicts.remove_tenant(tenant_id)

    async def close(self) -> None:
        await self._pool.close()  # fails the running checks

    async def _run(
        self, tenant_id: str, setup: ProcessSetup, key: bytes, request: bytes, *, is_retained: bool
    ) -> Verdict:
        before = self._num_forgotten
        reply = await self._pool.run(tenant_id, setup, CheckJob(request))
        assert isinstance(reply, Checked | JobRejected), "the reply to a CheckJob"
        num_bytes = len(reply.plan) if isinstance(reply, Checked) else len(reply.reason)
        if is_retained and self._num_forgotten == before:
            self._verdicts.put(tenant_id, key, reply, num_bytes)
        return reply
