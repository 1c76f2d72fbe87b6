"""Invariants that must hold at all times, checked while the fleet runs."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from services.decode.service import MAX_FENCED, MAX_WAITING
from services.gateway.streams.early_entries import MAX_EARLY_ENTRIES
from services.prefill.service import MAX_QUEUED_PREFILLS
from services.scheduler.service import MAX_PLACING
from shared.engine.batching.sequence import Sequence
from shared.messages import RunPrefill, TokenEntry
from tests.simulation.checks.expected import states_of
from tests.simulation.world.gateway import SimulatedGateway
from tests.simulation.world.hosts import SimulatedHost
from tests.simulation.world.members import AnyHost
from tests.support.world.services import SimulatedScheduler
from tests.support.world.workers import SimulatedWorker

if TYPE_CHECKING:
    from services.decode.running_request import RunningRequest
    from services.gateway.streams.stream import Stream
    from services.scheduler.backlog import QueuedRequest
    from services.scheduler.placement import Target
    from shared.engine.kv.ports import Push

# Of an idle process, too: one request each.
PROBES = ("HealthMonitor._probe", "PinKeeper._retain")
OUTBOX = "Outbox._run"
# The tasks of an idle process; one of each, except deliveries: one per link, and outboxes: a
# gateway of linked sites has one for them.
IDLE_TASKS = frozenset(
    {
        "DecodeService._sweep",
        "EngineLoop._run",
        "EngineLoop._tick",
        "HealthMonitor._beat",
        "HealthMonitor._watch",
        "HealthMonitor._measure",
        "KvIndexService._drop_kv",
        "KvIndexService._retain_pins",
        "KvIndexService._sweep",
        "KvIndexService._write_behind",
        "Limits._renew_leases",
        "Limits._flush_endings",
        OUTBOX,
        "PrefillService._sweep",
        "ProcessClock.sleep",
        "StreamDriver._tick",
        "SchedulerService._change_roles",
        "SchedulerService._dispatch",
        "SchedulerService._keep_alive",
        "SchedulerService._tick",
        "TokenFlusher.run",
        "UsageCounter._run",
        "EngineWorker._expire_pins",
        "EngineWorker._send_kv_events",
        "SiteService._report",
        "SiteService._sweep",
        "PrefixDigests.run",
        "RegionChanges.run",
        "OtherSites._sweep",
    }
)
DELIVERIES = "FrameDelivery._run"
CLIENT_TASK = "SimulatedGateway.serve"  # the simulation's own


class Monitor:
    def __init__(self, needs: Mapping[str, tuple[str, ...]]) -> None:
        """`needs`: the features that each request needs, by its id."""
        self._needs = needs
        self.wrongs: dict[str, None] = {}

    def record(self, wrong: str) -> None:
        self.wrongs[wrong] = None

    def watch(self, host: AnyHost) -> None:
        """Checks KV from other workers, who sends accepted tokens, placements, and what runs."""
        if isinstance(host, SimulatedWorker):
            self._watch_kv(host)
            self._watch_runs(host)
        elif isinstance(host, SimulatedGateway):
            self._watch_fence(host)
        elif isinstance(host, SimulatedScheduler):
            self._watch_placements(host)

    def check_bounds(self, hosts: list[AnyHost]) -> None:
        for host in hosts:
            for name, size, limit in _bounds(host):
                if size > limit:
                    self.record(f"{host.process.process_id}: {size} {name}, at most {limit}")

    def _watch_kv(self, worker: SimulatedWorker) -> None:
        engine = worker.engine
        batcher, pool = engine.batcher, engine.pool
        allocate, activate = batcher.allocate_prompt, engine.activate

        def watched_allocate(sequence: Sequence, *, spare: int, is_received: bool = False) -> bool:
            is_allocated = allocate(sequence, spare=spare, is_received=is_received)
            for table, first in zip(sequence.block_tables, sequence.first_blocks, strict=True):
                for block_id in table[first : sequence.num_committed_blocks]:
                    block = pool._known[block_id]
                    if block is None or block.tenant_id != sequence.tenant_id:
                        self.record(f"{worker.worker_id}: a prefix of another tenant was hit")
            self._check_kv(worker, sequence, "the prefix cache")
            return is_allocated

        def watched_activate(sequence: Sequence, num_computed_tokens: int) -> None:
            activate(sequence, num_computed_tokens)
            self._check_kv(worker, sequence, "a prefill worker")

        batcher.allocate_prompt = watched_allocate  # type: ignore[method-assign]
        engine.activate = watched_activate  # type: ignore[method-assign]

    def _watch_fence(self, gateway: SimulatedGateway) -> None:
        streams = gateway.streams
        accept = streams._accept

        def watched(stream: Stream, entry: TokenEntry, now: float) -> None:
            placement = stream.placement
            if placement is None or placement.placement_id != entry.placement_id:
                self.record(f"{gateway.process.process_id}: took what another placement sent")
            accept(stream, entry, now)

        streams._accept = watched  # type: ignore[method-assign]

    def _check_kv(self, worker: SimulatedWorker, sequence: Sequence, source: str) -> None:
        """The next token depends on the last KV only, so all KV from elsewhere is checked."""
        count, size = sequence.num_computed_tokens, worker.engine.pool.block_size
        expected = states_of(sequence.token_ids[:count], worker.variant)
        for group, first in enumerate(sequence.first_blocks):
            table = np.array(sequence.block_tables[group], dtype=np.int64)
            slots = (table[:, None] * size + np.arange(size)).ravel()[first * size : count]
            if worker.executor._kv[slots].tobytes() != b"".join(expected[first * size :]):
                self.record(f"{worker.worker_id}: wrong KV of group {group} from {source}")

    def _watch_runs(self, worker: SimulatedWorker) -> None:
        """No worker computes any part of a request that needs what the worker lacks."""
        decode, prefill = worker.decode, worker.prefill
        if decode is not None:
            admit = decode._admit

            def watched_admit(placement: RunningRequest, candidates: tuple[str, ...]) -> None:
                self._check_run(worker, placement.request.request_id)
                admit(placement, candidates)

            decode._admit = watched_admit  # type: ignore[method-assign]
        if prefill is not None:
            deliver = prefill._deliver

            def watched_deliver(
                command: RunPrefill, sequence: Sequence, push: Push
            ) -> Coroutine[Any, Any, None]:
                self._check_run(worker, command.request_id)
                return deliver(command, sequence, push)

            prefill._deliver = watched_deliver  # type: ignore[method-assign, assignment]

    def _check_run(self, worker: SimulatedWorker, request_id: str) -> None:
        if not set(self._needs[request_id]) <= set(worker.worker.served.card.features):
            self.record(f"{worker.worker_id}: runs {request_id}, but lacks what it needs")

    def _watch_placements(self, scheduler: SimulatedScheduler) -> None:
        start, peers = scheduler.service._start, scheduler.service.health_monitor.fleet

        def has_features(worker_id: str, needs: tuple[str, ...]) -> bool:
            heartbeat = peers.heartbeat_of(worker_id)
            card = None if heartbeat is None else heartbeat.model
            return card is not None and set(needs) <= set(card.features)

        async def watched(ticket: QueuedRequest, target: Target) -> None:
            if target.decode_id in ticket.submit.excluded_workers:
                self.record("a request went to a worker that it excludes")
            needs = self._needs[ticket.request.request_id]
            for worker_id in (target.decode_id, *target.prefill_candidates):
                if not has_features(worker_id, needs):
                    self.record("a request was offered to a worker that lacks what it needs")
            await start(ticket, target)

        scheduler.service._start = watched  # type: ignore[method-assign]


def _bounds(host: AnyHost) -> list[tuple[str, int, int]]:
    if isinstance(host, SimulatedScheduler):
        service = host.service
        return [
            ("queued requests", len(service._queues), host.max_queued_requests),
            ("placements under way", len(service._placing), MAX_PLACING),
        ]
    if isinstance(host, SimulatedGateway):
        return [("early entries", len(host.streams._early), MAX_EARLY_ENTRIES)]
    if isinstance(host, SimulatedHost):
        return [("bytes of memory", host.used_bytes, host.budget_bytes)]
    if not isinstance(host, SimulatedWorker):
        return []
    engine, found = host.engine, []
    if host.decode is not None:
        # accepted sequences that wait while others wait for their KV count, too
        found.append(("waiting sequences", len(engine.batcher.waiting), 4 * MAX_WAITING))
        found.append(("fenced placements", len(host.decode._fenced), MAX_FENCED))
    if host.prefill is not None:
        found.append(("prefills", len(host.prefill._prefills), MAX_QUEUED_PREFILLS))
    return found


def tasks_left(host: AnyHost) -> list[str]:
    found, tasks = [], host.process.task_names()
    for name, count in tasks.items():
        num_idle = 2 if name == OUTBOX and isinstance(host, SimulatedGateway) else 1
        is_own = name in (DELIVERIES, CLIENT_TASK, *PROBES)
        is_idle = is_own or (name in IDLE_TASKS and count <= num_idle)
        if not is_idle:
            found.append(f"{host.process.process_id}: {count} tasks of {name}")
    if host.bus.num_requests_under_way > sum(tasks[name] for name in PROBES):
        found.append(f"{host.process.process_id}: a request on the bus is under way")
    return found
