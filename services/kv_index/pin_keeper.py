"""Keeps pinned prefixes warm on every worker of their model, as workers join and leave.

Of several replicas the live one with the first name leads, and for the pins of a region class the
first of its regions; if two lead for a moment, workers receive the same commands twice. In each
round a worker receives the list of pins, which renews their leases, and at most one prefix to
compute, so that a new worker is not overloaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import structlog

from services.kv_index.pin_reasons import PinReasons
from services.kv_index.pins import PIN_LEASE_S, ExpectedPin, Pins
from services.kv_index.registry import PrefixRecord, PrefixRegistry
from shared.background import failing_alone, item_error
from shared.block_hash import PUBLIC_TENANT_ID
from shared.errors import ConfigError, DependencyUnavailable, HearthError, WorkerUnfit
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import Heartbeat, KeepPins, PinsKept, PrefixPinned
from shared.packing import pack_hashes, unpack_hashes
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.store import Store, StoreRejected, StoreUnavailable
from shared.subjects import is_at_site
from shared.subjects import pins as pins_of
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.residency import class_on_bus, regions_of
from shared.tenancy.tenant_copy import present_record

log = structlog.get_logger(__name__)

ROUND_S = 1.0
PIN_TIMEOUT_S = 0.5  # plus the round trip
MAX_AT_ONCE = 32  # concurrent requests to workers
MAX_PINS = 4_096  # pins of all tenants

WorkerKind = tuple[str, str, int, int, str]
PinsByClass = dict[str, dict[bytes, ExpectedPin]]


@dataclass(frozen=True, slots=True)
class _TenantPins:
    """The pins of one tenant. `next_over` is the earliest expiry, in unix seconds."""

    digests: set[str]
    next_over: float


class PinKeeper:
    """Keeps prefixes pinned. `wall_clock` returns unix seconds, the unit of the prefixes' expiry
    times.
    """

    def __init__(
        self,
        store: Store,
        health_monitor: HealthMonitor,
        holds: Callable[[str, bytes], bool],
        registry: PrefixRegistry,
        *,
        wall_clock: Callable[[], float],
        root_key: Callable[[], bytes] = bytes,
        classes: RegionClasses = NO_CLASSES,
        own_classes: Sequence[str] = (),
    ) -> None:
        """`holds(worker_id, block_hash)`: whether a worker holds a block, as far as the index
        knows. Pins of tenants with a region class are those of `own_classes` alone.
        """
        self.pins = Pins(root_key)
        self._classes = classes
        self._own_classes = ("", *own_classes)
        self._requests = health_monitor.requests
        self._store = store
        self._fleet = health_monitor.fleet
        self._holds = holds
        self._registry = registry
        self._wall_clock = wall_clock
        self._version = -1  # version of the prefixes that are read; -1: none are
        self._tenants: dict[str, _TenantPins] = {}
        # Tenants with prefixes beyond MAX_PINS, or an unreadable record
        self._waiting: set[str] = set()
        self._reasons = PinReasons(store, wall_clock)
        self._pinned_tips: set[bytes] = set()  # recorded in the registry
        self._pinned_workers: set[tuple[str, str]] = set()  # with the class of pins they may have
        self._round = 0

    async def round(self) -> None:
        try:
            await self._reload()
        except StoreUnavailable as error:  # known pins stay warm meanwhile
            log.debug("pins_read_failed", reason=error.message)
        if self._version < 0:
            return
        workers = self._workers()
        self._record(workers)
        self._round += 1
        classes = [each for each in self._own_classes if self._leads(each)]
        if classes:
            live = {each.process_id for each in workers}
            self._pinned_workers = {each for each in self._pinned_workers if each[0] in live}
            pins = self._pins_by_kind(workers)
            for first in range(0, len(workers), MAX_AT_ONCE):
                some = workers[first : first + MAX_AT_ONCE]
                await asyncio.gather(
                    *(self._retain_alone(each, classes, pins[_kind_of(each)]) for each in some)
                )
            await self._reasons.write()
        else:
            self._reasons.distrust()

    # ── pins ─────────────────────────────────────────────────────────────────────────────────────

    async def _reload(self) -> None:
        """Reads the tenants that have changed, or all of them at first and after a loss of
        Redis.
        """
        changes = await pinned_prefix.changes(self._store, self._version)
        now = self._wall_clock()
        changed = {each for each, pins in self._tenants.items() if now >= pins.next_over}
        if changes.version == self._version and not changed:
            return
        if changes.tenants is not None:
            changed.update(changes.tenants)
            for tenant_id in changed:
                self._reasons.forget(tenant_id)
        else:
            changed = {each async for each in pinned_prefix.tenants(self._store)}
            self._reasons.clear()
            for tenant_id in self._tenants.keys() - changed:
                self._forget(tenant_id)
        for tenant_id in sorted(changed | self._waiting):
            await self._read_alone(tenant_id, now)
        self.pins.retain_only({d for each in self._tenants.values() for d in each.digests})
        self._version = changes.version

    async def _read_alone(self, tenant_id: str, now: float) -> None:
        """Reads a tenant's records. Unreadable ones are read again later, and delay no other
        tenant. Raises StoreUnavailable.
        """
        try:
            await self._read(tenant_id, now)
        except StoreUnavailable:
            raise
        except BaseException as raised:
            item_error(raised)
            self._waiting.add(tenant_id)
            with failing_alone("pins_of_tenant_not_read", tenant=tenant_id):
                raise

    async def _read(self, tenant_id: str, now: float) -> None:
        """Reads a tenant's pins, checked against the tenant's present record."""
        entries = await pinned_prefix.entries(self._store, tenant_id)
        is_public = tenant_id == PUBLIC_TENANT_ID
        try:
            record = None if is_public else await present_record(self._store, tenant_id)
        except (ConfigError, StoreRejected) as error:  # the rules of the record are unknown
            log.warning("pins_of_tenant_dropped", tenant=tenant_id, reason=error.message)
            self._forget(tenant_id)
            self._waiting.add(tenant_id)
            return
        is_allowed = not record.is_zero_retention if record else not is_at_site(tenant_id)
        digests, ends = set[str](), list[float]()
        self._waiting.discard(tenant_id)
        num_others = sum(len(p.digests) for t, p in self._tenants.items() if t != tenant_id)
        for name, entry in entries.items():
            if entry.is_over(now):
                await pinned_prefix.delete(self._store, tenant_id, name, entry.digest)
            elif num_others + len(digests) >= MAX_PINS:
                self._waiting.add(tenant_id)
                self._reasons.explain(
                    tenant_id, name, f"the index holds {MAX_PINS} prefixes already"
                )
            elif is_allowed and await self._has(tenant_id, name, entry):
                digests.add(entry.digest)
                ends += [] if entry.expires_at is None else [entry.expires_at]
                self._reasons.explain(tenant_id, name, "")
        if not digests:
            self._forget(tenant_id)
            return
        if record is None:
            self.pins.allow(tenant_id, None)
        else:
            regions, name = regions_of(record, self._classes), class_on_bus(record, self._classes)
            self.pins.allow(tenant_id, regions, name)
        self._tenants[tenant_id] = _TenantPins(digests, min(ends, default=inf))

    def _forget(self, tenant_id: str) -> None:
        self._tenants.pop(tenant_id, None)
        self.pins.forget(tenant_id)

    async def _has(self, tenant_id: str, name: str, entry: pinned_prefix.Entry) -> bool:
        if not self.pins.has(entry.digest):
            prefix = await pinned_prefix.load(self._store, tenant_id, name, entry.digest)
            if prefix is None:  # changed since: read next round
                return False
            self.pins.add(entry.digest, prefix)
        return True

    def _record(self, workers: list[Heartbeat]) -> None:
        """Marks the pinned prefixes in the registry, which counts their hits."""
        cards = {_kind_of(each)[:-1]: each.model for each in workers if each.model is not None}
        token_bytes = {each.revision: each.kv_bytes_per_token for each in cards.values()}
        expected = self.pins.expected(cards.values())
        for tip_hash, pin in expected.items():
            self._registry.pin(_record(tip_hash, pin, token_bytes[pin.command.revision]))
        if cards:  # the tips are unknown without workers
            self.pins.retain_cards(cards.values())
            for tip_hash in sorted(self._pinned_tips - expected.keys()):
                self._registry.unpin(tip_hash)
            self._pinned_tips = set(expected)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────

    def _leads(self, region_class: str) -> bool:
        regions = self._classes.allowed(region_class, None)
        replicas = self._fleet.live("kv_index")
        live = {each.process_id for each in replicas if regions is None or each.region in regions}
        own = self._fleet.own_process_id
        return own == min(live | {own})

    def _workers(self) -> list[Heartbeat]:
        found = {
            each.process_id: each
            for role in ("prefill", "decode")
            for each in self._fleet.live(role)
            if each.model is not None
        }
        return [found[process_id] for process_id in sorted(found)]

    def _pins_by_kind(self, workers: list[Heartbeat]) -> dict[WorkerKind, PinsByClass]:
        """Returns the pins of each kind of worker, which are many more than the kinds."""
        found: dict[WorkerKind, PinsByClass] = {}
        for worker in workers:
            kind = _kind_of(worker)
            if kind in found or worker.model is None:
                continue
            by_class = found[kind] = PinsByClass()
            for tip, pin in self.pins.expected_of(worker.model, worker.region).items():
                by_class.setdefault(self.pins.class_of(pin), {})[tip] = pin
        return found

    async def _retain_alone(
        self, worker: Heartbeat, classes: Sequence[str], pins: PinsByClass
    ) -> None:
        for region_class in classes:
            with failing_alone("pin_failed", worker=worker.process_id):
                await self._retain(worker, region_class, pins.get(region_class, {}))

    async def _retain(
        self, worker: Heartbeat, region_class: str, expected: dict[bytes, ExpectedPin]
    ) -> None:
        worker_id = worker.process_id
        kind = worker_id, region_class
        if not expected and kind not in self._pinned_workers:
            return
        subject = pins_of(worker.roles[0], worker_id)
        command = KeepPins(
            tip_hashes=pack_hashes(list(expected)), lease_s=PIN_LEASE_S, region_class=region_class
        )
        try:
            reply = await self._requests.request(
                worker_id, subject, command, PinsKept, base_s=PIN_TIMEOUT_S
            )
            (self._pinned_workers.add if expected else self._pinned_workers.discard)(kind)
            cold = self._cold(worker_id, expected, reply)
            if cold:
                await self._warm(worker_id, subject, cold[self._round % len(cold)])
        except HearthError as error:  # the next round retries, starting with another prefix
            log.debug("pin_failed", worker=worker_id, reason=error.message)

    async def _warm(self, worker_id: str, subject: str, pin: ExpectedPin) -> None:
        """Requests that a worker computes the prefix. Raises HearthError."""
        tenant_id, name = pin.prefix.tenant_id, pin.prefix.name
        try:
            command = self.pins.command(pin, self._gateway_of(pin))
            await self._requests.request(
                worker_id, subject, command, PrefixPinned, base_s=PIN_TIMEOUT_S
            )
        except DependencyUnavailable:  # the way to the worker fails
            raise
        except HearthError as error:
            self._reasons.explain(tenant_id, name, f"{worker_id} cannot hold it: {error.message}")
            raise
        self._reasons.explain(tenant_id, name, "")

    def _gateway_of(self, pin: ExpectedPin) -> str:
        """Returns a gateway that may read the images of a prefix, another one in each round; none
        for a prefix without. Raises WorkerUnfit if there is none.
        """
        if not pin.command.images:
            return ""
        allows = self.pins.allows
        gateways = sorted(
            each.process_id
            for each in self._fleet.live("gateway")
            if allows(pin.prefix.tenant_id, each.region)
        )
        if not gateways:
            raise WorkerUnfit("no gateway in the tenant's regions reads its images")
        return gateways[self._round % len(gateways)]

    def _cold(
        self, worker_id: str, expected: dict[bytes, ExpectedPin], reply: PinsKept
    ) -> list[ExpectedPin]:
        missing = set(unpack_hashes(reply.missing_tip_hashes))
        return [
            pin
            for tip_hash, pin in expected.items()
            if tip_hash in missing or not self._holds(worker_id, tip_hash)
        ]


def _kind_of(worker: Heartbeat) -> WorkerKind:
    """Returns what the pins of a worker depend on."""
    card = worker.model
    assert card is not None
    return card.name, card.revision, card.block_size, card.max_context_tokens, worker.region


def _record(tip_hash: bytes, pin: ExpectedPin, token_bytes: int) -> PrefixRecord:
    command = pin.command
    return PrefixRecord(
        command.tenant_id,
        tip_hash,
        command.model,
        command.revision,
        pin.num_tokens,
        pin.num_tokens * token_bytes,
        0,
        pin=pin.prefix.name,
    )
