"""Maps blocks to the workers that hold them, according to the workers' events.

A cache of the workers' state: a wrong or empty index costs time, never correctness.

    worker:  unknown ───add_worker──▶ stale ──begin_resync──▶ resyncing ──finish──▶ exact
                                        ▲                        │  (queues and replays events)
                                        ├── gap, new epoch, or ──┼───────────────────────┤
                                        │   announced, missing   │
                                        └── pages of two epochs ─┘

For each group of layers, `BlockMasks` maps a block's 16-byte hash to a bit mask of the holders'
slots; a slot is one incarnation of one worker's cache. Losing a worker clears its slot's bit in the
mask of live slots, at once; `sweep` removes the dead bits from the masks later, in steps,
before the slot is used again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from services.kv_index.block_masks import BlockMasks
from services.kv_index.group_match import match_groups
from shared.kv_layout import MAX_GROUPS, Reach
from shared.messages import (
    BlockPage,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    IndexState,
    KvEvents,
    PrefixMatch,
    PrefixMatches,
)
from shared.packing import BLOCK_HASH_BYTES, unpack_hashes

MAX_QUEUED_BLOCKS = 1_000_000  # queued per worker during its resync; more blocks are a gap
MAX_INTERNED_MASKS = 65_536
MAX_KNOWN_MODELS = 256  # models with cached results of `_serving`


class Outcome(Enum):
    APPLIED = "applied"
    QUEUED = "kept"  # queued during a resync; replayed at its end
    IGNORED = "ignored"  # old, or from an unknown worker
    NEEDS_RESYNC = "needs resync"


class SyncState(Enum):
    STALE = "stale"
    RESYNCING = "resyncing"
    EXACT = "exact"


@dataclass(slots=True)
class _Resync:
    slot: int
    max_queued_blocks: int
    epoch: int | None = None
    sequence_number: int | None = None  # number of the oldest page: later events are replayed
    queued: list[KvEvents] = field(default_factory=list)
    num_queued_blocks: int = 0

    def queue(self, events: KvEvents) -> None:
        self.num_queued_blocks += _num_blocks(events)
        if self.num_queued_blocks <= self.max_queued_blocks:
            self.queued.append(events)


@dataclass(slots=True)
class _Worker:
    model: str
    revision: str
    kv_format: str
    slot: int
    reaches: tuple[Reach, ...] = (None,)  # reaches of its groups of layers
    block_size: int = 16
    state: SyncState = SyncState.STALE
    epoch: int | None = None
    sequence_number: int = 0
    announced: tuple[int, int] = (0, 0)  # epoch and number of its last event, in its last heartbeat
    resync: _Resync | None = None


class _Serving(NamedTuple):
    """The slots of the workers of a model, by reaches and block size."""

    masks: tuple[tuple[tuple[tuple[Reach, ...], int], int], ...]
    state: IndexState


class PrefixIndex:
    def __init__(self, *, max_queued_blocks: int = MAX_QUEUED_BLOCKS) -> None:
        self._max_queued_blocks = max_queued_blocks
        self._holders = [BlockMasks() for _ in range(MAX_GROUPS)]
        self._masks: dict[int, int] = {}  # interned: many blocks share few masks
        self._workers: dict[str, _Worker] = {}
        self._worker_of_slot: dict[int, str] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._dead_mask = 0  # slots to be swept
        self._sweeping_mask = 0
        self._sweep_keys: Iterator[tuple[int, bytes]] = iter(())
        self._serving_of: dict[tuple[str, str], _Serving] = {}  # cleared on a change

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._holders))

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def num_inexact_workers(self) -> int:
        return sum(worker.state is not SyncState.EXACT for worker in self._workers.values())

    # ── workers ──────────────────────────────────────────────────────────────────────────────────

    def add_worker(
        self,
        worker_id: str,
        model: str,
        revision: str,
        kv_format: str,
        *,
        reaches: tuple[Reach, ...] = (None,),
        block_size: int = 16,
    ) -> bool:
        """Returns False for a known worker with the same model; removes a changed worker first."""
        known = self._workers.get(worker_id)
        if known is not None:
            identity = (known.model, known.revision, known.kv_format)
            layout = (known.reaches, known.block_size)
            if (identity, layout) == ((model, revision, kv_format), (reaches, block_size)):
                return False
            self.remove_worker(worker_id)
        slot = self._take_slot(worker_id)
        self._workers[worker_id] = _Worker(
            model, revision, kv_format, slot, reaches[:MAX_GROUPS], block_size
        )
        self._serving_of.clear()
        return True

    def remove_worker(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        self._serving_of.clear()
        if worker is not None:
            self._retire(worker.slot)
            if worker.resync is not None:
                self._retire(worker.resync.slot)

    def state_of(self, worker_id: str) -> SyncState | None:
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.state

    def holds(self, worker_id: str, block_hash: bytes) -> bool:
        """Whether it holds the block for the first group of layers."""
        worker = self._workers.get(worker_id)
        return worker is not None and bool(self._holders[0].get(block_hash) >> worker.slot & 1)

    def worker_ids(self) -> tuple[str, ...]:
        return tuple(self._workers)

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def apply(self, events: KvEvents) -> Outcome:
        worker = self._workers.get(events.worker_id)
        if worker is None:
            return Outcome.IGNORED
        if worker.resync is not None:
            worker.resync.queue(events)
            return Outcome.QUEUED
        if worker.state is SyncState.STALE:
            return Outcome.NEEDS_RESYNC
        if events.epoch == worker.epoch and events.sequence_number <= worker.sequence_number:
            return Outcome.IGNORED
        if not self._follows(worker, events):
            self._transition_to(worker, SyncState.STALE)
            return Outcome.NEEDS_RESYNC
        self._take_in(worker, events)
        return Outcome.APPLIED

    def announce(self, worker_id: str, epoch: int, num_events: int) -> Outcome:
        """Checks that the events announced by the previous heartbeat have arrived.

        Without this, a loss of the last events would not be detected: a gap shows only with the
        events after it. If two heartbeats have another epoch than the blocks, a second process of
        this id, which has left, listed the blocks.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return Outcome.IGNORED
        due, worker.announced = worker.announced, (epoch, num_events)
        is_missing = due[0] == worker.epoch and worker.sequence_number < due[1]
        is_of_other = due[0] == epoch != worker.epoch
        if worker.state is not SyncState.EXACT or not (is_missing or is_of_other):
            return Outcome.APPLIED
        self._transition_to(worker, SyncState.STALE)
        return Outcome.NEEDS_RESYNC

    def begin_resync(self, worker_id: str) -> None:
        """Begins to list a worker's blocks in a new slot; `match` uses the old slot until
        `finish_resync`.
        """
        worker = self._workers[worker_id]
        if worker.resync is not None:
            self._retire(worker.resync.slot)
        worker.resync = _Resync(self._take_slot(worker_id), self._max_queued_blocks)
        self._transition_to(worker, SyncState.RESYNCING)

    def add_page(self, page: BlockPage) -> bool:
        """Returns False if the page cannot belong to this resync, which must restart."""
        worker = self._workers.get(page.worker_id)
        resync = None if worker is None else worker.resync
        if worker is None or resync is None:
            return False
        identity = (page.model, page.revision, page.kv_format)
        if identity != (worker.model, worker.revision, worker.kv_format):
            return False
        if resync.epoch is None:
            resync.epoch, resync.sequence_number = page.epoch, page.sequence_number
        if resync.epoch != page.epoch:
            return False
        assert resync.sequence_number is not None
        resync.sequence_number = min(resync.sequence_number, page.sequence_number)
        for run in page.stored:
            self._store(resync.slot, run.group, unpack_hashes(run.block_hashes))
        return True

    def finish_resync(self, worker_id: str) -> Outcome:
        """Replays the events received meanwhile, from the oldest page on: a repeated event is
        harmless, since the last event that names a block decides."""
        worker = self._workers[worker_id]
        resync = worker.resync
        if resync is None or resync.epoch is None or resync.sequence_number is None:
            self._transition_to(worker, SyncState.STALE)
            return Outcome.NEEDS_RESYNC
        self._retire(worker.slot)
        worker.slot, worker.resync = resync.slot, None
        worker.epoch, worker.sequence_number = resync.epoch, resync.sequence_number
        self._transition_to(worker, SyncState.EXACT)
        outcomes = [self.apply(events) for events in resync.queued]
        lost = Outcome.NEEDS_RESYNC in outcomes
        return Outcome.NEEDS_RESYNC if lost else Outcome.APPLIED

    def abandon_resync(self, worker_id: str) -> None:
        """Ends a resync to which the worker did not reply: its old blocks remain, marked stale."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.resync is not None:
            self._retire(worker.resync.slot)
            worker.resync = None
            self._transition_to(worker, SyncState.STALE)

    # ── queries ──────────────────────────────────────────────────────────────────────────────────

    def match(self, block_hashes: Sequence[bytes], model: str, revision: str) -> PrefixMatches:
        """Returns, per worker of this model, the number of blocks from the first on after which it
        can continue.
        """
        serving = self._serving(model, revision)
        matches: list[PrefixMatch] = []
        for (reaches, block_size), mask in serving.masks:
            if reaches == (None,):
                matches += self._match_leading(block_hashes, mask)
                continue
            for num_blocks, found in match_groups(
                self._holders[: len(reaches)], reaches, block_hashes, block_size, mask
            ):
                matches += self._matches(found, num_blocks)
        return PrefixMatches(state=serving.state, matches=tuple(matches))

    def _match_leading(self, block_hashes: Sequence[bytes], mask: int) -> list[PrefixMatch]:
        """Returns the matches of workers with one group of layers that sees all keys."""
        matches: list[PrefixMatch] = []
        parts = self._holders[0].parts
        for num_blocks, block_hash in enumerate(block_hashes):
            holding = mask & parts[block_hash[0]].get(block_hash, 0)
            if holding != mask:
                if num_blocks:
                    matches += self._matches(mask & ~holding, num_blocks)
                mask = holding
                if not mask:
                    break
        if block_hashes:
            matches += self._matches(mask, len(block_hashes))
        return matches

    def sweep(self, max_blocks: int) -> None:
        """Removes the bits of dead slots from up to `max_blocks` entries. It is
        called periodically.
        """
        if not self._sweeping_mask:
            if not self._dead_mask:
                return
            self._sweeping_mask, self._dead_mask = self._dead_mask, 0
            self._sweep_keys = (
                (group, key)
                for group, of_group in enumerate(self._holders)
                for key in of_group.hashes()
            )
        retained = ~self._sweeping_mask
        for _ in range(max_blocks):
            key = next(self._sweep_keys, None)
            if key is None:
                self._free_swept()
                return
            group, block_hash = key
            mask = self._holders[group].get(block_hash)
            if mask & ~retained:
                self._put(group, block_hash, mask & retained)

    # ── internals ────────────────────────────────────────────────────────────────────────────────

    def _transition_to(self, worker: _Worker, state: SyncState) -> None:
        worker.state = state
        self._serving_of.clear()

    @staticmethod
    def _follows(worker: _Worker, events: KvEvents) -> bool:
        identity = (events.epoch, events.model, events.revision, events.kv_format)
        expected = (worker.epoch, worker.model, worker.revision, worker.kv_format)
        return identity == expected and events.sequence_number == worker.sequence_number + 1

    def _take_in(self, worker: _Worker, events: KvEvents) -> None:
        for event in events.events:
            match event:
                case BlocksStored():
                    self._store(worker.slot, event.group, unpack_hashes(event.block_hashes))
                case BlocksRemoved():
                    self._remove(worker.slot, event.group, unpack_hashes(event.block_hashes))
                case BlocksCleared():
                    self._retire(worker.slot)
                    worker.slot = self._take_slot(events.worker_id)
                    self._serving_of.clear()
        worker.sequence_number = events.sequence_number

    def _store(self, slot: int, group: int, block_hashes: Sequence[bytes]) -> None:
        bit, parts, masks = 1 << slot, self._holders[group].parts, self._masks
        if len(masks) > MAX_INTERNED_MASKS:
            masks.clear()
        for block_hash in block_hashes:
            part = parts[block_hash[0]]
            mask = part.get(block_hash, 0) | bit
            part[block_hash] = masks.setdefault(mask, mask)

    def _remove(self, slot: int, group: int, block_hashes: Sequence[bytes]) -> None:
        retained = ~(1 << slot)
        for block_hash in block_hashes:
            mask = self._holders[group].get(block_hash)
            if mask:
                self._put(group, block_hash, mask & retained)

    def _put(self, group: int, block_hash: bytes, mask: int) -> None:
        part = self._holders[group].part_of(block_hash)
        if mask:
            if len(self._masks) > MAX_INTERNED_MASKS:
                self._masks.clear()
            part[block_hash] = self._masks.setdefault(mask, mask)
        else:
            part.pop(block_hash, None)

    def _serving(self, model: str, revision: str) -> _Serving:
        known = self._serving_of.get((model, revision))
        if known is None:
            if len(self._serving_of) >= MAX_KNOWN_MODELS:
                self._serving_of.clear()
            known = self._serving_of[model, revision] = self._found_serving(model, revision)
        return known

    def _found_serving(self, model: str, revision: str) -> _Serving:
        masks: dict[tuple[tuple[Reach, ...], int], int] = {}
        is_exact = True
        for worker in self._workers.values():
            if (worker.model, worker.revision) == (model, revision):
                layout = (worker.reaches, worker.block_size)
                masks[layout] = masks.get(layout, 0) | 1 << worker.slot
                is_exact &= worker.state is SyncState.EXACT
        return _Serving(tuple(masks.items()), "exact" if is_exact else "degraded")

    def _matches(self, mask: int, num_blocks: int) -> Iterator[PrefixMatch]:
        while mask:
            bit = mask & -mask
            worker_id = self._worker_of_slot[bit.bit_length() - 1]
            yield PrefixMatch(worker_id=worker_id, num_blocks=num_blocks)
            mask ^= bit

    def _take_slot(self, worker_id: str) -> int:
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
        else:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
        self._worker_of_slot[slot] = worker_id
        return slot

    def _retire(self, slot: int) -> None:
        del self._worker_of_slot[slot]
        self._dead_mask |= 1 << slot

    def _free_swept(self) -> None:
        mask, self._sweeping_mask = self._sweeping_mask, 0
        while mask:
            bit = mask & -mask
            heapq.heappush(self._free_slots, bit.bit_length() - 1)
            mask ^= bit
        self._masks.clear()  # most of them contained dead slots


def _num_blocks(events: KvEvents) -> int:
    """Returns the number of named blocks, plus one per event, as an event without
    blocks takes memory.
    """
    return sum(
        1 if isinstance(each, BlocksCleared) else 1 + len(each.block_hashes) // BLOCK_HASH_BYTES
        for each in events.events
    )
