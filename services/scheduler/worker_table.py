"""The workers of one model and role as columns, so that a decision is a few vector operations.

A row changes with its worker's heartbeats and assignments. Rows are dense and unordered: the last
row fills the gap of a removed worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import inf

import numpy as np
from numpy.typing import NDArray

from services.scheduler.cost_kernel import (
    BLOCK_SIZE,
    BUSY_UNTIL,
    CLOSED_UNTIL,
    CONTEXT_TOKENS,
    FORMAT,
    FREE_TOKENS,
    LOAD_S,
    NAME,
    NUM_CODES,
    NUM_FLOATS,
    NUMERICS,
    REGION,
    TOTAL_TOKENS,
    RoleWorkers,
    WorkerColumns,
)
from services.scheduler.throughput import Speed
from shared.messages import MAX_CONTEXT_TOKENS
from shared.subjects import is_at_site

BASE_TOKENS = 64  # minimum cost of a request, so that "twice the best" works on idle workers
KV_READ_SHARE = 0.05  # cost of reading one token's KV, relative to computing a token
WAITING_TOKENS = 256  # cost of a request that has not been started, in tokens
STALL_SHARE = 0.1  # share of a local prefill's time that counts as delay of each running request
MAX_AHEAD_S = 0.1  # maximum work queued at a worker; other requests wait in the fair queue
# Of prompts for a site: long ones that wait there leave the workers at home to short ones.
MAX_AHEAD_OF_SITE_S = 2.0
MAX_MASKS = 64  # one for each combination of regions and features that requests need
FIRST_ROWS = 16
_NO_ROWS, _NO_TOKENS = np.zeros(0, dtype=np.int64), np.zeros(0)
_EVERYONE = np.zeros(0, dtype=np.bool_)  # stands for a mask


@dataclass(slots=True)
class WorkerRow:
    """A live worker as placement sees it: its last heartbeat and the assignments since."""

    worker_id: str
    kv_format: str  # equal for workers that may share KV
    block_size: int
    num_free_blocks: int
    num_total_blocks: int
    num_running: float = 0
    num_waiting: int = 0
    busy_until: float = 0.0  # estimated time when its assigned prompts are computed
    decode_tokens: float = 0
    region: str = ""
    speed: Speed = field(default_factory=Speed)
    max_context_tokens: int = MAX_CONTEXT_TOKENS  # the longest sequence that it computes
    is_avoided: bool = False  # rejected or timed out since its last heartbeat
    numerics: str = ""
    features: frozenset[str] = frozenset()
    push_free_at: float = 0.0  # when the link to its site has sent what was assigned to it
    # More: those of a site, which share its work; the loads are those of the mean one.
    num_engines: int = 1
    round_trip_s: float = 0.0  # to another site
    max_ahead_s: float = MAX_AHEAD_S
    also_decodes: bool = False  # a prefill worker whose blocks running answers hold

    @property
    def closed_until(self) -> float:
        """The worker has enough work before this time; -inf until its speed is measured. What is
        on its way to another site is no work there yet.
        """
        ahead_s = self.max_ahead_s + self.round_trip_s
        return self.busy_until - ahead_s if self.speed.is_measured else -inf

    @property
    def num_free_tokens(self) -> int:
        """Too few for any request, -1, if it is avoided."""
        return -1 if self.is_avoided else self.num_free_blocks * self.block_size

    @property
    def load_s(self) -> float:
        """Cost of decoding here in seconds, wherever the prompt is computed."""
        in_tokens = (
            BASE_TOKENS + KV_READ_SHARE * self.decode_tokens + WAITING_TOKENS * self.num_waiting
        )
        return in_tokens * self.speed.token_s

    @property
    def local_token_s(self) -> float:
        """Seconds per prompt token computed here, including the delay of running requests."""
        return self.speed.token_s * (1.0 + STALL_SHARE * (1 + self.num_running))


@lru_cache(maxsize=65_536)
def code_of(name: str) -> int:
    """Returns a 64-bit hash of a worker, region, KV format or numerics; the same in every
    process.
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


class WorkerTable:
    """The named columns are views of the rows in use, valid until the next change."""

    def __init__(self, workers: Iterable[WorkerRow] = ()) -> None:
        self.ids: list[str] = []
        self._row_of: dict[str, int] = {}
        self._features: list[frozenset[str]] = []  # one set a row
        self._num_at_sites = 0
        self._masks: dict[tuple[tuple[str, ...], ...], NDArray[np.bool_]] = {}  # until a change
        self._floats = np.zeros((NUM_FLOATS, FIRST_ROWS))
        self._codes = np.zeros((NUM_CODES, FIRST_ROWS), dtype=np.uint64)
        self._use(0)
        for worker in workers:
            self.put(worker)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._row_of

    @property
    def num_at_sites(self) -> int:
        """The number of workers that belong to other sites."""
        return self._num_at_sites

    def all_have(self, feature: str) -> bool:
        """Whether every worker has the feature."""
        return bool(self.allowed((), (feature,)).all())

    def row_of(self, worker_id: str) -> int | None:
        return self._row_of.get(worker_id)

    def rows_of(self, worker_ids: Collection[str]) -> NDArray[np.int64]:
        """Returns the rows of the workers in this table; ignores unknown ids."""
        if not worker_ids:
            return _NO_ROWS
        rows = [self._row_of[each] for each in worker_ids if each in self._row_of]
        return np.array(rows, dtype=np.int64)

    def side(
        self,
        num_cached_blocks: Mapping[str, int],
        max_cached_tokens: int,
        allowed_regions: Collection[str],
        features: tuple[str, ...] = (),
        *,
        is_local: bool = False,
        but: Collection[str] = (),
    ) -> RoleWorkers:
        """Returns the table with the cached tokens of each holder, at most `max_cached_tokens`.
        `is_local`: workers of other sites are not allowed. Nor are those in `but`.
        """
        is_allowed = self.allowed(allowed_regions, features)
        rows = self.rows_of(but)
        if len(rows):
            is_allowed = is_allowed.copy() if len(is_allowed) else np.ones(len(self), np.bool_)
            is_allowed[rows] = False
        if is_local and self._num_at_sites:
            is_here = np.array([not is_at_site(each) for each in self.ids], dtype=np.bool_)
            is_allowed = is_here & is_allowed if len(is_allowed) else is_here
        row_of = self._row_of
        held = {row_of[name]: num for name, num in num_cached_blocks.items() if name in row_of}
        if not held:
            return RoleWorkers(self.columns, _NO_ROWS, _NO_TOKENS, is_allowed)
        rows = np.fromiter(held, dtype=np.int64, count=len(held))
        num_blocks = np.fromiter(held.values(), dtype=np.float64, count=len(held))
        held_tokens = np.minimum(num_blocks * self.block_sizes[rows], float(max_cached_tokens))
        return RoleWorkers(self.columns, rows, held_tokens, is_allowed)

    def put(self, worker: WorkerRow) -> None:
        """Adds the worker, or overwrites its row."""
        row = self._row_of.get(worker.worker_id)
        if row is None:
            row = self._add(worker.worker_id)
        region = code_of(worker.region)
        if self._features[row] != worker.features or self._codes[REGION, row] != region:
            self._features[row] = worker.features
            self._codes[REGION, row] = region
            self._masks.clear()
        self._codes[FORMAT, row] = code_of(worker.kv_format)
        self._codes[NUMERICS, row] = code_of(worker.numerics)
        block_size = worker.block_size
        self._floats[:, row] = (  # values in the order of the columns
            block_size,
            worker.num_free_tokens,
            worker.num_total_blocks * block_size,
            worker.load_s,
            worker.speed.step_s,
            worker.busy_until,
            worker.closed_until,
            worker.speed.token_s,
            worker.local_token_s,
            worker.speed.push_token_s,
            min(worker.max_context_tokens, worker.num_total_blocks * block_size),
            worker.push_free_at,
            worker.num_free_tokens if worker.also_decodes else inf,
        )

    def opens_at(self, regions: Collection[str] = (), features: tuple[str, ...] = ()) -> float:
        """Returns the estimated time at which the first worker in `regions` with `features` accepts
        requests again, or inf without workers.
        """
        closed_until = self.columns.floats[CLOSED_UNTIL, : len(self)]
        is_allowed = self.allowed(regions, features)
        if len(is_allowed):
            closed_until = closed_until[is_allowed]
        return float(closed_until.min(initial=inf))

    def remove(self, worker_id: str) -> None:
        row = self._row_of.pop(worker_id, None)
        if row is None:
            return
        self._masks.clear()
        self._num_at_sites -= is_at_site(worker_id)
        last_id, last_features = self.ids.pop(), self._features.pop()
        last = len(self.ids)
        if row != last:
            self.ids[row], self._features[row] = last_id, last_features
            self._row_of[last_id] = row
            for columns in (self._floats, self._codes):
                columns[:, row] = columns[:, last]
        self._use(last)

    def allowed(self, regions: Collection[str], features: tuple[str, ...]) -> NDArray[np.bool_]:
        """Returns the mask of the rows in `regions` with all `features`; empty if neither
        limits the rows.
        """
        if not features and not regions:
            return _EVERYONE
        key = tuple(regions), features
        mask = self._masks.get(key)
        if mask is None:
            if len(self._masks) >= MAX_MASKS:
                self._masks.clear()
            mask = self._masks[key] = self._mask(*key)
        return mask

    def _mask(self, regions: tuple[str, ...], features: tuple[str, ...]) -> NDArray[np.bool_]:
        is_capable = self._having(frozenset(features))
        return is_capable & self.in_regions(regions) if regions else is_capable

    def _having(self, needed: frozenset[str]) -> NDArray[np.bool_]:
        return np.array([needed <= each for each in self._features], dtype=np.bool_)

    def in_regions(self, regions: Collection[str]) -> NDArray[np.bool_]:
        """Returns the mask of the rows in `regions`; a worker without a region never matches."""
        return np.isin(self.region_codes, [code_of(each) for each in regions if each])

    def has_any(
        self,
        regions: Collection[str],
        *,
        but: Collection[str],
        num_context_tokens: int = 0,
        features: tuple[str, ...] = (),
    ) -> bool:
        """Whether a worker in `regions`, other than `but`, has a context of so many tokens and all
        `features`.
        """
        usable = self._allowed_with_context(num_context_tokens, regions, features)
        usable[self.rows_of(set(but))] = False
        return bool(usable.any())

    def unfit_for_move(self, num_tokens: int, numerics: str | None) -> list[str]:
        """Returns the workers without free blocks for so many tokens, and those of other numerics.
        An empty one has room for any request, whose choices may take turns.
        """
        total = self._floats[TOTAL_TOKENS, : len(self)]
        is_unfit = (self.free_tokens < num_tokens) & (self.free_tokens < total)
        if numerics is not None:
            is_unfit |= self.columns.codes[NUMERICS, : len(self)] != code_of(numerics)
        return [self.ids[row] for row in np.flatnonzero(is_unfit)]

    def smallest_context(self, num_tokens: int) -> int:
        """Returns the smallest context of at least `num_tokens`, or 0 if there is none."""
        fitting = self.context_tokens[self.context_tokens >= num_tokens]
        return int(fitting.min()) if len(fitting) else 0

    def numerics_mismatches(
        self,
        numerics: str,
        num_context_tokens: int,
        regions: Collection[str],
        *,
        but: Collection[str],
        features: tuple[str, ...] = (),
    ) -> list[str]:
        """Returns the workers of other numerics, if a worker of these has the context and all
        `features`.

        Without such a worker the list is empty. Workers in `but` do not count as such.
        """
        is_equal = self.columns.codes[NUMERICS, : len(self)] == code_of(numerics)
        could = is_equal & self._allowed_with_context(num_context_tokens, regions, features)
        could[self.rows_of(set(but))] = False
        return [self.ids[row] for row in np.flatnonzero(~is_equal)] if could.any() else []

    def _allowed_with_context(
        self, num_tokens: int, regions: Collection[str], features: tuple[str, ...]
    ) -> NDArray[np.bool_]:
        has_context = self.context_tokens >= num_tokens
        is_allowed = self.allowed(regions, features)
        return has_context & is_allowed if len(is_allowed) else has_context

    def _add(self, worker_id: str) -> int:
        row = len(self.ids)
        if row == self._floats.shape[1]:
            self._floats = np.concatenate([self._floats, np.zeros_like(self._floats)], axis=1)
            self._codes = np.concatenate([self._codes, np.zeros_like(self._codes)], axis=1)
        self.ids.append(worker_id)
        self._num_at_sites += is_at_site(worker_id)
        self._features.append(frozenset())
        self._masks.clear()
        self._row_of[worker_id] = row
        self._codes[NAME, row] = code_of(worker_id)
        self._use(row + 1)
        return row

    def _use(self, size: int) -> None:
        self.columns = WorkerColumns(self._floats, self._codes, size)
        self.block_sizes = self._floats[BLOCK_SIZE, :size]
        self.free_tokens = self._floats[FREE_TOKENS, :size]
        self.context_tokens = self._floats[CONTEXT_TOKENS, :size]
        self.load_s = self._floats[LOAD_S, :size]
        self.busy_until = self._floats[BUSY_UNTIL, :size]
        self.region_codes = self._codes[REGION, :size]
        self.name_codes = self._codes[NAME, :size]
