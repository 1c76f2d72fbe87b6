"""Writes into the audit log what processes have refused, as their heartbeats report it, and what
this gateway has refused to store of text.

Each gateway hears all heartbeats. Redis remembers how much of each kind is in the log, so that of
several gateways one writes a line, and a gateway that starts repeats none.
"""

from __future__ import annotations

from collections import Counter

import structlog

from services.gateway.tenancy.errors import PermissionDenied
from shared.background import failing_alone
from shared.clock import Clock
from shared.messages import Heartbeat
from shared.store import Store, StoreUnavailable
from shared.tenancy import audit
from shared.tenancy.refusals import RefusalIncreases

log = structlog.get_logger(__name__)

COUNTS = "hearth:audit:refusal_counts"  # hash: process, epoch and kind → how many are in the log
COUNTS_S = 7 * 86_400
FLUSH_S = 1.0
MAX_PENDING = 4096  # kinds
MAX_COUNTS = 32_768  # kinds: linked sites name their tenants as they like

# KEYS: the counts. ARGV: a kind, its count since the start of its process, seconds to remember, the
# most kinds. Returns how many of them are not in the log yet. A hash that is full starts again: of
# running processes, what comes next is listed with all before.
CLAIM_LUA = """
local more = tonumber(ARGV[2]) - tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
if more <= 0 then return 0 end
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return more
"""

Kind = tuple[str, int, str, str, str]  # process, epoch, check, tenant, region


class RefusalAudit:
    def __init__(
        self, store: Store, clock: Clock, process_id: str = "", *, max_counts: int = MAX_COUNTS
    ) -> None:
        self._store = store
        self._clock = clock
        self._process_id = process_id
        self._max_counts = max_counts
        self._increases = RefusalIncreases()
        self._own: Counter[tuple[str, str, str]] = Counter()  # tenant, what, code
        self._pending: dict[Kind, tuple[int, str]] = {}  # the count, and the process's region

    def observe(self, heartbeat: Heartbeat) -> None:
        changed = {(e.check, e.tenant_id, e.region) for e in self._increases.take(heartbeat)}
        for each in heartbeat.refusals:
            kind = (each.check, each.tenant_id, each.region)
            if kind in changed and len(self._pending) < MAX_PENDING:
                found = (heartbeat.process_id, heartbeat.epoch, *kind)
                self._pending[found] = each.count, heartbeat.region

    def refused(self, tenant_id: str, what: str, error: PermissionDenied) -> None:
        """Takes a refusal of this gateway to store text of a tenant: of what, and why."""
        kind = (tenant_id, what, error.code)
        if kind in self._own or len(self._own) < MAX_PENDING:
            self._own[kind] += 1

    async def run(self) -> None:
        while True:
            await self._clock.sleep(FLUSH_S)
            with failing_alone("refusals_not_audited"):
                try:
                    await self.flush()
                except StoreUnavailable as error:  # tried again with the next round
                    log.debug("refusals_not_audited", reason=error.message)

    async def flush(self) -> None:
        """Writes what has come since the last call. Raises StoreUnavailable."""
        for own in list(self._own):
            tenant_id, what, code = own
            count, shown = self._own[own], {"tenant": tenant_id, "count": self._own[own]}
            arguments = audit.shown_arguments({}, shown)
            line = audit.line_command(
                self._process_id, f"refuse {what}", arguments, code, "refusal"
            )
            await self._store.write([line])
            self._own[own] -= count
            self._own += Counter()  # without zeros
        for kind, (count, own_region) in list(self._pending.items()):
            process_id, epoch, check, tenant_id, region = kind
            name = "|".join((process_id, str(epoch), check, tenant_id, region))
            claim: list[str | int] = [name, count, COUNTS_S, self._max_counts]
            more = await self._store.evaluate(CLAIM_LUA, [COUNTS], claim)
            if more:
                await self._record(process_id, check, tenant_id, region, own_region, int(more))
            if self._pending.get(kind) == (count, own_region):
                del self._pending[kind]

    async def _record(
        self, process_id: str, check: str, tenant_id: str, region: str, own: str, count: int
    ) -> None:
        shown = {"check": check, "tenant": tenant_id, "region": region, "own": own, "count": count}
        await audit.record(
            self._store,
            who=process_id,
            command="refuse data",
            arguments=audit.shown_arguments({}, shown),
            outcome="outside_regions",
            kind="refusal",
        )
