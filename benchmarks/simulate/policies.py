"""Placement policies: the real one, and those it is compared with.

All have the same workers, through the scheduler's own fleet, and wait in the same queue while no
worker has room. The simple ones always hand a prompt off, as a split fleet without a cost model
does, and have no limit of work per worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from services.scheduler.placement import LocalPrefill, ModelWorkers, RequestSize, Target, place
from services.scheduler.worker_table import WorkerTable


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and what is known when it is placed. `tried` are the workers that have rejected
    it.
    """

    needs: RequestSize
    workers: ModelWorkers
    num_cached_blocks: Mapping[str, int]
    tried: Collection[str]
    now: float


class Policy(ABC):
    """A policy of placement. `name` is its name in results. If `asks_index`, it uses the index's
    matches.
    """

    name: str
    asks_index = False

    @abstractmethod
    def choose(self, asked: Asked) -> Target | None: ...


class Hearth(Policy):
    name = "hearth"
    asks_index = True

    def __init__(self, random_below: Callable[[int], int]) -> None:
        self._random_below = random_below
        self._local_prefill = LocalPrefill(always=4, at_most=1_000_000)

    def choose(self, asked: Asked) -> Target | None:
        return place(
            asked.needs,
            asked.workers,
            asked.num_cached_blocks,
            local_prefill=self._local_prefill,
            now=asked.now,
            random_below=self._random_below,
            excluded=asked.tried,
        )


class RoundRobin(Policy):
    name = "round robin"

    def __init__(self) -> None:
        self._num_decode = self._num_prefill = 0

    def choose(self, asked: Asked) -> Target | None:
        rows = with_room(asked)
        if not len(rows):
            return None
        self._num_decode += 1
        self._num_prefill += 1
        later = rows[rows >= self._num_decode % len(asked.workers.decodes)]
        decode = int(later[0] if len(later) else rows[0])
        self._num_decode = decode
        prefill = self._num_prefill % len(asked.workers.prefills)
        return target_of(asked, decode, prefill, 0)


class LeastLoaded(Policy):
    """The least KV to read in decode, the least queued work in prefill."""

    name = "least loaded"

    def choose(self, asked: Asked) -> Target | None:
        rows = with_room(asked)
        if not len(rows):
            return None
        workers = asked.workers
        decode = int(rows[workers.decodes.load_s[rows].argmin()])
        return target_of(asked, decode, int(workers.prefills.busy_until.argmin()), 0)


class PrefixOnly(Policy):
    """The longest prefix wins at any cost; without one, the next worker in turn."""

    name = "prefix only"
    asks_index = True

    def __init__(self) -> None:
        self._otherwise = RoundRobin()

    def choose(self, asked: Asked) -> Target | None:
        chosen = self._otherwise.choose(asked)
        if chosen is None:
            return None
        workers, num_cached_blocks = asked.workers, asked.num_cached_blocks
        rows = with_room(asked)
        decode = deepest(workers.decodes, num_cached_blocks, rows)
        if decode is None:
            decode = workers.decodes.row_of(chosen.decode_id)
            assert decode is not None
        every = np.arange(len(workers.prefills))
        prefill = deepest(workers.prefills, num_cached_blocks, every)
        if prefill is None:
            prefill = workers.prefills.row_of(chosen.prefill_candidates[0])
            assert prefill is not None
        num_cached = num_cached_blocks.get(workers.prefills.ids[prefill], 0)
        return target_of(asked, decode, prefill, num_cached)


def with_room(asked: Asked) -> np.ndarray:
    decodes, tried = asked.workers.decodes, asked.tried
    rows = np.flatnonzero(decodes.free_tokens > asked.needs.num_tokens)
    if tried:
        rows = np.array([row for row in rows if decodes.ids[row] not in tried], dtype=np.intp)
    return rows


def deepest(
    table: WorkerTable, num_cached_blocks: Mapping[str, int], rows: np.ndarray
) -> int | None:
    side = table.side(num_cached_blocks, 1 << 30, ())
    is_there = np.isin(side.holders, rows)
    holders, tokens = side.holders[is_there], side.held_tokens[is_there]
    return int(holders[tokens.argmax()]) if len(holders) else None


def target_of(asked: Asked, decode: int, prefill: int, num_cached_blocks: int) -> Target:
    needs, decodes, prefills = asked.needs, asked.workers.decodes, asked.workers.prefills
    num_cached = int(num_cached_blocks * prefills.block_sizes[prefill])
    return Target(
        decode_id=decodes.ids[decode],
        prefill_candidates=(prefills.ids[prefill],),
        num_blocks=needs.num_blocks(int(decodes.block_sizes[decode])),
        num_uncached_tokens=max(0, needs.num_tokens - 1 - num_cached),
    )
