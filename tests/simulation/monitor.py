"""What must hold at every moment, looked at while the fleet runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.decode.service import MAX_FENCED, MAX_WAITING
from services.gateway.placements import MAX_EARLY_ENTRIES
from services.prefill.service import MAX_QUEUED_PREFILLS
from services.scheduler.service import MAX_PLACING
from shared.engine.sequence import Sequence
from tests.simulation.gateway import SimulatedGateway
from tests.simulation.members import AnyHost, SimulatedScheduler
from tests.simulation.workers import SimulatedWorker

if TYPE_CHECKING:
    from services.scheduler.admission import Ticket
    from services.scheduler.placement import Target

# The tasks of a process that has nothing to do; one of each, but for deliveries: one a link.
IDLE_TASKS = frozenset(
    {
        "DecodeService._sweep",
        "EngineLoop._run",
        "Event.wait",
        "Heart._beat",
        "Heart._watch",
        "KvIndexService._sweep",
        "KvIndexService._write_behind",
        "Outbox._run",
        "PrefillService._sweep",
        "ProcessClock.sleep",
        "Recovery._tick",
        "SchedulerService._dispatch",
        "SchedulerService._keep_alive",
        "SchedulerService._tick",
        "Worker._tell_kv_events",
    }
)
DELIVERIES = "Deliveries._run"
CLIENT_TASK = "SimulatedGateway.serve"  # the simulation's own


class Monitor:
    def __init__(self) -> None:
        self.wrongs: dict[str, None] = {}

    def note(self, wrong: str) -> None:
        self.wrongs[wrong] = None

    def watch(self, host: AnyHost) -> None:
        """Looks at each hit of the prefix cache, and at each choice of a worker."""
        if isinstance(host, SimulatedWorker):
            self._watch_hits(host)
        elif isinstance(host, SimulatedScheduler):
            self._watch_exclusions(host)

    def look(self, hosts: list[AnyHost]) -> None:
        for host in hosts:
            for name, size, limit in _bounds(host):
                if size > limit:
                    self.note(f"{host.process.process_id}: {size} {name}, at most {limit}")

    def _watch_hits(self, worker: SimulatedWorker) -> None:
        batcher, pool = worker.engine.batcher, worker.engine.pool
        allocate = batcher.allocate_prompt

        def watched(sequence: Sequence, *, spare: int) -> bool:
            is_allocated = allocate(sequence, spare=spare)
            for block_id in sequence.block_table[: sequence.num_committed_blocks]:
                block = pool._known[block_id]
                if block is None or block.tenant_id != sequence.tenant_id:
                    self.note(f"{worker.worker_id}: a prefix of another tenant was hit")
            return is_allocated

        batcher.allocate_prompt = watched  # type: ignore[method-assign]

    def _watch_exclusions(self, scheduler: SimulatedScheduler) -> None:
        start = scheduler.service._start

        async def watched(ticket: Ticket, target: Target) -> None:
            if target.decode.worker_id in ticket.submit.excluded_workers:
                self.note("a request went to a worker that it excludes")
            await start(ticket, target)

        scheduler.service._start = watched  # type: ignore[method-assign]


def _bounds(host: AnyHost) -> list[tuple[str, int, int]]:
    if isinstance(host, SimulatedScheduler):
        service = host.service
        return [
            ("queued requests", len(service._admission), host.max_queued_requests),
            ("placements under way", len(service._placing), MAX_PLACING),
        ]
    if isinstance(host, SimulatedGateway):
        return [("early entries", len(host.streams._early), MAX_EARLY_ENTRIES)]
    if not isinstance(host, SimulatedWorker):
        return []
    engine, found = host.engine, []
    if host.decode is not None:
        # what was accepted while others waited for their KV waits, too
        found.append(("waiting sequences", len(engine.batcher.waiting), 4 * MAX_WAITING))
        found.append(("fenced placements", len(host.decode._fenced), MAX_FENCED))
    if host.prefill is not None:
        found.append(("prefills", len(host.prefill._prefills), MAX_QUEUED_PREFILLS))
    return found


def tasks_left(host: AnyHost) -> list[str]:
    found = []
    for name, count in host.process.task_names().items():
        is_idle = name in (DELIVERIES, CLIENT_TASK) or (name in IDLE_TASKS and count == 1)
        if not is_idle:
            found.append(f"{host.process.process_id}: {count} tasks of {name}")
    if host.bus.num_requests_under_way:
        found.append(f"{host.process.process_id}: a request on the bus is under way")
    return found
