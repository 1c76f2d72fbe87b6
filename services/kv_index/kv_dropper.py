"""Has workers drop the KV of tenants, as `shared/tenancy/deletion/kv_drops.py` orders.

Every replica forgets its records of such tenants; the leader, as of PinKeeper, sends the orders and
reports. A worker gets every order of the last day that this process has not seen it follow: it may
have been silent when the order came, and hold what it held before. That is so in the regions that a
tenant keeps, too: its blocks there are listed, and their removal is told, in the class of before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import structlog

from services.kv_index.registry import PrefixRegistry
from shared.background import failing_alone
from shared.clock import Clock
from shared.errors import HearthError
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import MAX_DROPPED_TENANTS, DropTenantKv, Heartbeat, TenantKvDropped
from shared.sites.tenant_names import names_of
from shared.store import Store, StoreUnavailable
from shared.subjects import tenant_kv
from shared.tenancy import audit
from shared.tenancy.deletion import kv_drops, tenant_data
from shared.tenancy.deletion.kv_drops import DropProgress, KvDrop

log = structlog.get_logger(__name__)

ROUND_S = HEARTBEAT_INTERVAL_S
DROP_TIMEOUT_S = 0.5  # plus the round trip
MAX_AT_ONCE = 32  # concurrent requests to workers
# Requests that a gateway sent before it knew of the change have ended by then. It counts from when
# this process has read the order: longer than needed after a restart, and never shorter.
UNRETAINED_S = 900.0

Incarnation = tuple[str, int]  # a worker and its epoch


@dataclass(slots=True)
class _Order:
    drop: KvDrop
    read_at: float  # by this process's clock, which no operator's clock is compared with
    waiting: set[Incarnation] = field(default_factory=set)
    dropped: dict[Incarnation, int] = field(default_factory=dict)  # blocks
    compared: frozenset[Incarnation] | None = None  # the workers that `waiting` is of
    is_lost: bool = False  # Redis has it no more: it was emptied
    reported: DropProgress | None = None

    @property
    def is_finished(self) -> bool:
        return self.reported is not None and self.reported.finished_at is not None

    @property
    def progress(self) -> DropProgress:
        return DropProgress(
            waiting=tuple(sorted(worker_id for worker_id, _ in self.waiting)),
            num_workers=len(self.dropped),
            num_blocks=sum(self.dropped.values()),
        )


class KvDropper:
    """Follows the orders. `wall_clock` returns Unix seconds, `can_judge` whether all live workers
    are known.
    """

    def __init__(
        self,
        store: Store,
        health_monitor: HealthMonitor,
        registry: PrefixRegistry,
        clock: Clock,
        *,
        wall_clock: Callable[[], float],
        can_judge: Callable[[], bool],
    ) -> None:
        self._can_judge = can_judge
        self._store = store
        self._fleet = health_monitor.fleet
        self._requests = health_monitor.requests
        self._registry = registry
        self._clock = clock
        self._wall_clock = wall_clock
        self._last = 0
        self._orders: dict[int, _Order] = {}
        self._unforgotten: dict[int, KvDrop] = {}  # new, and Redis did not answer
        self._incarnations = frozenset[Incarnation]()  # another object once they change

    async def round(self) -> None:
        with failing_alone("kv_drops_not_followed"):
            try:
                await self._reload()
            except StoreUnavailable as error:  # known orders are followed meanwhile
                log.debug("kv_drops_not_read", reason=error.message)
            if self._orders and self.leads:
                await self._follow()

    @property
    def leads(self) -> bool:
        live = {each.process_id for each in self._fleet.live("kv_index")}
        own = self._fleet.own_process_id
        return own == min(live | {own})

    async def _reload(self) -> None:
        last = await kv_drops.last_number(self._store)
        if last == self._last:
            return
        found = {each.drop.number: each for each in await kv_drops.orders(self._store)}
        known, now = self._orders, self._clock.now()
        self._orders = self._lost(was_emptied=last < self._last) | {
            number: known.get(number) or _Order(each.drop, now, reported=each.progress)
            for number, each in found.items()
        }
        dropped = (each.drop.tenant_id for each in self._orders.values())
        self._registry.dropped = frozenset(name for each in dropped for name in names_of(each))
        self._unforgotten |= {number: found[number].drop for number in found.keys() - known.keys()}
        for number, drop in list(self._unforgotten.items()):
            await self._forget(drop)
            del self._unforgotten[number]
        self._last = last

    def _lost(self, *, was_emptied: bool) -> dict[int, _Order]:
        """Returns the orders that have not finished, of a Redis that was emptied: who gave one does
        not give it again.
        """
        for each in self._orders.values() if was_emptied else ():
            each.is_lost = True
        return {
            number: each
            for number, each in self._orders.items()
            if each.is_lost and not each.is_finished
        }

    async def _forget(self, drop: KvDrop) -> None:
        """Forgets what the index has recorded of the tenant. Raises StoreUnavailable."""
        for name in names_of(drop.tenant_id):
            self._registry.drop_tenant(name)
            await tenant_data.delete_prefix_records(self._store, name)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────

    async def _follow(self) -> None:
        workers = self._workers()
        if workers.keys() != self._incarnations:
            self._incarnations = frozenset(workers)
        for order in self._orders.values():
            if order.waiting or order.compared is not self._incarnations:
                order.waiting = set(self._incarnations - order.dropped.keys())
                order.compared = self._incarnations
        waiting = set[Incarnation]().union(*(each.waiting for each in self._orders.values()))
        asked = [each for each in workers if each in waiting]
        for first in range(0, len(asked), MAX_AT_ONCE):
            some = asked[first : first + MAX_AT_ONCE]
            await asyncio.gather(*(self._drop_alone(workers[each]) for each in some))
        for order in self._orders.values():
            await self._report(order)

    def _workers(self) -> dict[Incarnation, Heartbeat]:
        """Returns the workers that are alive, also those that drain or are in standby."""
        return {
            (each.process_id, each.epoch): each
            for each in self._fleet.everyone()
            if each.load is not None and self._fleet.is_live(each.process_id)
        }

    async def _drop_alone(self, worker: Heartbeat) -> None:
        with failing_alone("kv_not_dropped", worker=worker.process_id):
            await self._drop(worker)

    async def _drop(self, worker: Heartbeat) -> None:
        worker_id, own = worker.process_id, (worker.process_id, worker.epoch)
        due = [each for each in self._orders.values() if own in each.waiting]
        newest = max(each.read_at for each in due)
        unretained_s = max(0.0, UNRETAINED_S - (self._clock.now() - newest))
        names = list(dict.fromkeys(name for each in due for name in names_of(each.drop.tenant_id)))
        num_blocks, busy = 0, set[str]()
        for first in range(0, len(names), MAX_DROPPED_TENANTS):
            some = tuple(names[first : first + MAX_DROPPED_TENANTS])
            command = DropTenantKv(tenant_ids=some, unretained_s=unretained_s)
            try:
                reply = await self._requests.request(
                    worker_id,
                    tenant_kv(worker.roles[0], worker_id),
                    command,
                    TenantKvDropped,
                    base_s=DROP_TIMEOUT_S,
                )
            except HearthError as error:  # the next round retries
                log.warning("kv_not_dropped", worker=worker_id, reason=error.message)
                return
            num_blocks += reply.num_blocks
            busy.update(reply.busy_tenant_ids)
        for order in due:
            if not (order.drop.tenant_id in busy and order.drop.reason == "removed"):
                order.waiting.discard(own)
                order.dropped[own], num_blocks = num_blocks, 0

    # ── reports ──────────────────────────────────────────────────────────────────────────────────

    async def _report(self, order: _Order) -> None:
        if order.is_finished:
            return
        before = order.reported
        progress, is_finished = order.progress, not order.waiting and self._can_judge()
        if is_finished:
            progress = msgspec.structs.replace(progress, finished_at=self._wall_clock())
        if progress == before:
            return
        try:
            if is_finished:
                await self._forget(order.drop)  # an event may have come before the order
                await self._audit(order.drop, progress)
            if not order.is_lost:
                await kv_drops.report(self._store, order.drop.number, progress)
        except StoreUnavailable as error:
            log.warning("kv_drop_not_reported", reason=error.message)
            return
        order.reported = progress

    async def _audit(self, drop: KvDrop, progress: DropProgress) -> None:
        arguments = {
            "tenant": drop.tenant_id,
            "reason": drop.reason,
            "workers": progress.num_workers,
            "blocks": progress.num_blocks,
            "seconds": round(max(0.0, (progress.finished_at or 0.0) - drop.ordered_at), 1),
        }
        await audit.record(
            self._store,
            who=self._fleet.own_process_id,
            command="drop kv",
            arguments=audit.shown_arguments({}, arguments),
            outcome="done",
            kind="deletion",
        )
