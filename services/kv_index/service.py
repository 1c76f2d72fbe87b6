"""The index process: receives every worker's cache events, returns which workers hold a prefix.

Blocks are not persisted: each live worker lists all its blocks after its first heartbeat, and again
after a gap in its events or when its last events did not arrive. The records of prefixes outlive
this process in Redis; they are read again for each tenant that is met.

Any number of replicas may run. All receive all events; each answers a share of the queries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import structlog

from services.kv_index.class_indexes import ClassIndexes
from services.kv_index.index import Outcome, PrefixIndex
from services.kv_index.kv_dropper import ROUND_S as DROP_ROUND_S
from services.kv_index.kv_dropper import KvDropper
from services.kv_index.pin_keeper import ROUND_S, PinKeeper
from services.kv_index.registry import PrefixRegistry
from shared import subjects
from shared.background import Background, failing_alone
from shared.clock import Clock, MonotonicClock
from shared.config import KvIndexConfig, check, redis_tls_of
from shared.errors import HearthError, InvalidRequest
from shared.lifecycle.health import Loss
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.lifecycle.identity import connect
from shared.messages import (
    BlockPage,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Heartbeat,
    IndexLoad,
    KvEvents,
    ListBlocks,
    MatchPrefix,
    ModelCard,
    PrefixMatches,
)
from shared.metrics.process_report import ProcessReport
from shared.packing import BLOCK_HASH_BYTES, unpack_hashes
from shared.randomness import Randomness, SystemRandomness
from shared.secrets.root_key import root_key_of
from shared.store import RedisStore, Store
from shared.transport.bus import Bus, Unsubscribe

log = structlog.get_logger(__name__)

LIST_TIMEOUT_S = 1.0  # plus the round trip
MAX_PAGES = 1000  # pages of one worker: 20 million blocks
RESYNC_BACKOFF_S = 0.25
FLUSH_S = 0.2
STORE_TIMEOUT_S = 1.0  # no request waits for Redis here
SWEEP_S = 0.05
SWEEP_BLOCKS = 5_000  # about two milliseconds of the event loop


class KvIndexService:
    def __init__(
        self,
        config: KvIndexConfig,
        bus: Bus,
        store: Store,
        clock: Clock,
        randomness: Randomness,
        *,
        wall_clock: Callable[[], float],
    ) -> None:
        self.health_monitor = HealthMonitor(
            bus,
            clock,
            randomness,
            roles=("kv_index",),
            region=config.region,
            loads=Loads(index=self._load, store=store.load),
        )
        self.indexes = ClassIndexes(bus.regions.own_classes)
        self._num_resyncs = 0
        self._num_matches = 0
        self._registry = PrefixRegistry(
            store,
            wall_clock,
            max_per_tenant=config.max_prefixes_per_tenant,
            ttl_s=config.prefix_ttl_s,
        )
        self._keeper = PinKeeper(
            store,
            self.health_monitor,
            self.indexes.holds,
            self._registry,
            wall_clock=wall_clock,
            root_key=root_key_of(config.secret("cluster_secret")),
            classes=bus.regions.classes,
            own_classes=bus.regions.own_classes,
        )
        self._dropper = KvDropper(
            store,
            self.health_monitor,
            self._registry,
            clock,
            wall_clock=wall_clock,
            can_judge=lambda: self.health_monitor.fleet.can_judge(clock.now()),
        )
        self._bus = bus
        self._store = store
        self._clock = clock
        self._resyncs: dict[tuple[str, str], asyncio.Task[None]] = {}  # by worker and region class
        self._background = Background()
        self._leave_group: Unsubscribe | None = None

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        self.health_monitor.on_lost(self._peer_lost)
        self.health_monitor.on_heartbeat(self._on_heartbeat)
        await self._bus.subscribe(subjects.KV_EVENTS, KvEvents, self._take_events)
        await self.health_monitor.start()
        self._leave_group = await self._bus.serve(
            subjects.MATCH, MatchPrefix, self._match, queue=subjects.KV_INDEX_GROUP
        )
        self._background.start_own(self._sweep())
        self._background.start_own(self._write_behind())
        self._background.start_own(self._retain_pins())
        self._background.start_own(self._drop_kv())
        await self.health_monitor.transition_to("ready")

    async def drain(self) -> None:
        if self._leave_group is not None:
            await self._leave_group()
        await self.health_monitor.transition_to("draining")
        while self._registry.num_pending and await self._registry.flush():
            pass

    async def stop(self) -> None:
        await self._background.stop()
        await self.health_monitor.stop()
        await self._bus.close()
        await self._store.close()

    def report(self) -> ProcessReport:
        return self.health_monitor.report()

    def _load(self) -> IndexLoad:
        num_inexact = self.indexes.num_inexact_workers
        return IndexLoad(
            state="degraded" if num_inexact else "exact",
            num_blocks=self.indexes.num_blocks,
            num_workers=self.indexes.plain.num_workers,
            num_inexact_workers=num_inexact,
            num_resyncs=self._num_resyncs,
            num_matches=self._num_matches,
            num_pending_records=self._registry.num_pending,
            num_pinned_prefixes=len(self._keeper.pins),
        )

    # ── incoming messages ────────────────────────────────────────────────────────────────────────

    def _match(self, message: MatchPrefix) -> PrefixMatches:
        block_hashes = unpack_hashes(message.block_hashes)
        self._num_matches += 1
        reply = self.indexes.match(
            message.region_class,
            block_hashes,
            message.model,
            message.revision,
            num_public=message.num_public_blocks,
        )
        if reply.matches and message.is_counted:
            deepest = max(match.num_blocks for match in reply.matches)
            self._registry.matched(message.tenant_id, block_hashes, deepest)
        return reply

    def _take_events(self, message: KvEvents) -> None:
        try:
            outcome = self.indexes.of(message.region_class).apply(message)
            if outcome is Outcome.NEEDS_RESYNC:
                self._start_resync(message.worker_id, message.region_class)
            elif outcome is not Outcome.IGNORED:
                self._record(message)
        except InvalidRequest as error:  # the worker's next event shows a gap
            log.warning("kv_events_invalid", worker=message.worker_id, error=error.message)

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        worker_id, load = heartbeat.process_id, heartbeat.load
        is_live = self.health_monitor.fleet.is_live(worker_id)
        if heartbeat.model is None or load is None or not is_live:
            return
        numbers = {"": load.num_kv_events, **dict(load.num_class_kv_events)}
        for region_class, index in self.indexes.items():
            if region_class in numbers:
                self._announce(heartbeat, heartbeat.model, region_class, numbers[region_class])
            else:  # a process that has had no blocks of the class
                index.remove_worker(worker_id)

    def _announce(
        self, heartbeat: Heartbeat, card: ModelCard, region_class: str, num_events: int
    ) -> None:
        worker_id, index = heartbeat.process_id, self.indexes.of(region_class)
        known = index.state_of(worker_id) is not None
        if index.add_worker(
            worker_id,
            card.name,
            card.revision,
            card.kv_format,
            reaches=card.kv_reaches,
            block_size=card.block_size,
        ):
            if known:
                self._registry.cleared(worker_id)
            self._start_resync(worker_id, region_class)
        outcome = index.announce(worker_id, heartbeat.epoch, num_events)
        if outcome is Outcome.NEEDS_RESYNC:
            self._start_resync(worker_id, region_class)

    def _peer_lost(self, process_id: str, loss: Loss) -> None:
        for region_class, index in self.indexes.items():
            task = self._resyncs.pop((process_id, region_class), None)
            if task is not None:
                task.cancel()
            index.remove_worker(process_id)
        self._registry.cleared(process_id)

    # ── resync ───────────────────────────────────────────────────────────────────────────────────

    def _start_resync(self, worker_id: str, region_class: str) -> None:
        key = worker_id, region_class
        if key not in self._resyncs:
            self._resyncs[key] = self._background.start_item(
                self._resync(*key), partial(self._give_up_resync, *key)
            )

    async def _resync(self, worker_id: str, region_class: str) -> None:
        """Retries until the worker's blocks are known exactly; loss of the worker cancels this."""
        while not await self._try_resync(worker_id, region_class):
            await self._clock.sleep(RESYNC_BACKOFF_S)
        self._resyncs.pop((worker_id, region_class), None)

    def _give_up_resync(self, worker_id: str, region_class: str, error: Exception) -> None:
        """Abandons a resync. The worker's next event or heartbeat starts another."""
        self._resyncs.pop((worker_id, region_class), None)
        self._resync_failed(worker_id, region_class, repr(error))

    async def _try_resync(self, worker_id: str, region_class: str) -> bool:
        heartbeat = self.health_monitor.fleet.heartbeat_of(worker_id)
        index = self.indexes.of(region_class)
        if heartbeat is None or index.state_of(worker_id) is None:
            return True  # lost; its next heartbeat starts another resync
        subject = subjects.list_blocks(heartbeat.roles[0], worker_id)
        failed = partial(self._resync_failed, worker_id, region_class)
        index.begin_resync(worker_id)
        self._num_resyncs += 1
        cursor = 0
        try:
            for _ in range(MAX_PAGES):
                question = ListBlocks(cursor=cursor, region_class=region_class)
                page = await self.health_monitor.requests.request(
                    worker_id, subject, question, BlockPage, base_s=LIST_TIMEOUT_S
                )
                if page.worker_id != worker_id or not index.add_page(page):
                    return failed("the pages are inconsistent")
                self._record_runs(page)
                if page.next_cursor is None:
                    return self._finish_resync(worker_id, index)
                if page.next_cursor <= cursor:
                    break
                cursor = page.next_cursor
            return failed("the list of pages does not end")
        except HearthError as error:
            return failed(str(error))

    def _finish_resync(self, worker_id: str, index: PrefixIndex) -> bool:
        if index.finish_resync(worker_id) is not Outcome.APPLIED:
            return False
        if self.indexes.is_exact(worker_id):
            self._registry.checked(worker_id, partial(self.indexes.holds, worker_id))
        return True

    def _resync_failed(self, worker_id: str, region_class: str, reason: str) -> bool:
        log.info("resync_failed", worker=worker_id, reason=reason)
        self.indexes.of(region_class).abandon_resync(worker_id)
        return False

    # ── the registry ─────────────────────────────────────────────────────────────────────────────

    def _record(self, message: KvEvents) -> None:
        for event in message.events:
            match event:
                case BlocksStored():
                    self._record_run(message, event)
                case BlocksRemoved() if event.group == 0:
                    self._registry.removed(message.worker_id, event.block_hashes)
                case BlocksCleared():
                    self._registry.cleared(message.worker_id)

    def _may_hold(self, worker_id: str, block_hash: bytes) -> bool:
        """Whether the worker may hold the block. True also for a live worker that is not exact: the
        end of its resync corrects this.
        """
        if not self.health_monitor.fleet.is_live(worker_id):
            return False
        is_exact = self.indexes.is_exact(worker_id)
        return self.indexes.holds(worker_id, block_hash) or not is_exact

    def _record_runs(self, page: BlockPage) -> None:
        for run in page.stored:
            self._record_run(page, run)

    def _record_run(self, source: KvEvents | BlockPage, run: BlocksStored) -> None:
        """Records a run of the first group of layers, which sees all keys if any group does."""
        heartbeat = self.health_monitor.fleet.heartbeat_of(source.worker_id)
        if heartbeat is None or heartbeat.model is None or not run.block_hashes or run.group:
            return
        num_blocks = run.first_block_index + len(run.block_hashes) // BLOCK_HASH_BYTES
        num_tokens = num_blocks * heartbeat.model.block_size
        self._registry.stored(
            source.worker_id,
            tenant_id=run.tenant_id,
            model=source.model,
            revision=source.revision,
            num_tokens=num_tokens,
            num_bytes=num_tokens * heartbeat.model.kv_bytes_per_token,
            parent_hash=run.parent_hash,
            tip_hash=run.block_hashes[-BLOCK_HASH_BYTES:],
        )

    # ── loops ────────────────────────────────────────────────────────────────────────────────────

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_S)
            self.indexes.sweep(SWEEP_BLOCKS)

    async def _write_behind(self) -> None:
        while True:
            await self._clock.sleep(FLUSH_S)
            if self.health_monitor.fleet.can_judge(self._clock.now()):  # who is silent is gone
                await self._registry.recover(self._may_hold)
            with failing_alone("prefix_records_not_written"):
                while self._registry.num_pending and await self._registry.flush():
                    pass
            await self._registry.trim()

    async def _retain_pins(self) -> None:
        while True:
            await self._clock.sleep(ROUND_S)
            with failing_alone("pins_not_retained"):
                await self._keeper.round()

    async def _drop_kv(self) -> None:
        while True:
            await self._clock.sleep(DROP_ROUND_S)
            await self._dropper.round()


async def build_kv_index(config: KvIndexConfig) -> KvIndexService:
    """Builds the index's process. Raises ConfigError, or DependencyUnavailable without a NATS
    server; Redis may start later.
    """
    check(config)
    bus = await connect(config, "kv_index")
    clock = MonotonicClock()
    store = RedisStore(config.redis_url, clock, timeout_s=STORE_TIMEOUT_S, tls=redis_tls_of(config))
    return KvIndexService(
        config,
        bus,
        store,
        clock,
        SystemRandomness(),
        wall_clock=time.time,
    )
