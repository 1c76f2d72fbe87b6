"""The workers as placement sees them: their heartbeats, and what was placed since.

A heartbeat is a quarter of a second old at times; without the second half a burst would go to one
worker. An assignment counts until a heartbeat arrives that must know of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from services.scheduler.admission import Lane
from services.scheduler.placement import Needs, Target, Worker
from shared.health import Fleet
from shared.messages import Heartbeat, Role

# An assignment this much older than a heartbeat's arrival was known to the worker that sent it.
SETTLED_S = 0.05


@dataclass(eq=False, slots=True)
class Assignment:
    worker_id: str
    prefill_worker_id: str | None
    num_blocks: int
    num_tokens: int
    num_uncached_tokens: int
    confirmed_at: float | None = None


@dataclass
class WorkerFleet:
    """Loads are this scheduler's estimates; other schedulers place, too."""

    fleet: Fleet
    _assignments: dict[str, list[Assignment]] = field(default_factory=dict)
    _avoided: set[str] = field(default_factory=set)

    def workers(self, role: Role, lane: Lane, excluded: Collection[str]) -> list[Worker]:
        """Live ones that serve the lane's model and take work, with their estimated load."""
        return [
            self._worker(each)
            for each in self._serving(role, lane, excluded)
            if each.process_id not in self._avoided
        ]

    def has_worker(self, lane: Lane, excluded: Collection[str]) -> bool:
        return any(self._serving("decode", lane, excluded))

    def could_hold(self, lane: Lane, needs: Needs) -> bool:
        """False if every live worker's whole cache is too small."""
        sizes = [
            (each.load.num_total_blocks, each.model.block_size)
            for each in self._serving("decode", lane, ())
            if each.load is not None and each.model is not None
        ]
        return not sizes or any(needs.num_blocks(block_size) <= n for n, block_size in sizes)

    def assign(self, target: Target, needs: Needs) -> Assignment:
        prefill = target.prefill_candidates[0] if target.prefill_candidates else None
        assignment = Assignment(
            worker_id=target.decode.worker_id,
            prefill_worker_id=prefill,
            num_blocks=target.num_blocks,
            num_tokens=needs.num_tokens,
            num_uncached_tokens=target.num_uncached_tokens,
        )
        for worker_id in _involved(assignment):
            self._assignments.setdefault(worker_id, []).append(assignment)
        return assignment

    def confirm(self, assignment: Assignment, now: float) -> None:
        assignment.confirmed_at = now

    def release(self, assignment: Assignment) -> None:
        for worker_id in _involved(assignment):
            kept = [each for each in self._of(worker_id) if each is not assignment]
            self._keep(worker_id, kept)

    def avoid(self, worker_id: str) -> None:
        """It refused or did not answer: not again before its next heartbeat."""
        self._avoided.add(worker_id)

    def heard(self, heartbeat: Heartbeat, now: float) -> None:
        worker_id = heartbeat.process_id
        self._avoided.discard(worker_id)
        settled = now - SETTLED_S
        kept = [
            each
            for each in self._of(worker_id)
            if each.confirmed_at is None or each.confirmed_at > settled
        ]
        self._keep(worker_id, kept)

    def lost(self, worker_id: str) -> None:
        self._assignments.pop(worker_id, None)
        self._avoided.discard(worker_id)

    def _of(self, worker_id: str) -> list[Assignment]:
        return self._assignments.get(worker_id, [])

    def _keep(self, worker_id: str, kept: list[Assignment]) -> None:
        if kept:
            self._assignments[worker_id] = kept
        else:
            self._assignments.pop(worker_id, None)

    def _serving(self, role: Role, lane: Lane, excluded: Collection[str]) -> Iterator[Heartbeat]:
        for each in self.fleet.live(role):
            card = each.model
            if card is None or each.load is None or each.process_id in excluded:
                continue
            if (card.name, card.revision) == lane:
                yield each

    def _worker(self, heartbeat: Heartbeat) -> Worker:
        card, load = heartbeat.model, heartbeat.load
        assert card is not None and load is not None  # `_serving` lets no other pass
        prefill_tokens, decode_tokens = load.prefill_tokens_in_flight, load.decode_tokens_in_flight
        num_free_blocks = load.num_free_blocks
        for each in self._of(heartbeat.process_id):
            if each.worker_id == heartbeat.process_id:
                num_free_blocks -= each.num_blocks
                decode_tokens += each.num_tokens
            if (each.prefill_worker_id or each.worker_id) == heartbeat.process_id:
                prefill_tokens += each.num_uncached_tokens
        return Worker(
            worker_id=heartbeat.process_id,
            kv_format=card.kv_format,
            block_size=card.block_size,
            num_free_blocks=num_free_blocks,
            num_total_blocks=load.num_total_blocks,
            num_waiting=load.num_waiting,
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
        )


def _involved(assignment: Assignment) -> tuple[str, ...]:
    prefill = assignment.prefill_worker_id
    return (assignment.worker_id,) if prefill is None else (assignment.worker_id, prefill)
