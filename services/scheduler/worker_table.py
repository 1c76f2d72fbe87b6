"""The workers of one model and role as columns, so that a decision is a few vector operations.

A row changes with its worker's heartbeats and assignments. Rows lie densely in no order: the last
one fills the gap that a worker leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.scheduler.speeds import Speed

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

BASE_TOKENS = 64  # a request is never free: keeps "twice the best" meaningful on idle workers
KV_READ_SHARE = 0.05  # of computing a token: that KV of one is there to be read
WAITING_TOKENS = 256  # what a request costs that has not been started
STALL_SHARE = 0.1  # of the time that a prefill on decode makes each running request wait
MAX_AHEAD_S = 0.1  # of work at a worker: beyond it, requests wait in the fair queue
FIRST_ROWS = 16
_NO_ROWS, _NO_TOKENS = np.zeros(0, dtype=np.intp), np.zeros(0)


@dataclass(slots=True)
class Worker:
    """A live worker as placement sees it: its last heartbeat and what was placed since."""

    worker_id: str
    kv_format: str
    block_size: int
    num_free_blocks: int
    num_total_blocks: int
    num_running: int = 0
    num_waiting: int = 0
    busy_until: float = 0.0  # when the prompts given to it will have been computed
    decode_tokens: int = 0
    region: str = ""
    speed: Speed = field(default_factory=Speed)
    is_avoided: bool = False  # it refused lately

    @property
    def closed_until(self) -> float:
        """Before then it has enough to do; nobody knows until its speed was measured."""
        return self.busy_until - MAX_AHEAD_S if self.speed.is_measured else -inf

    @property
    def load_s(self) -> float:
        """What decoding here costs, wherever the prompt is computed."""
        in_tokens = (
            BASE_TOKENS + KV_READ_SHARE * self.decode_tokens + WAITING_TOKENS * self.num_waiting
        )
        return in_tokens * self.speed.token_s

    @property
    def local_token_s(self) -> float:
        """A prompt token computed here, with what those who decode here wait for it."""
        return self.speed.token_s * (1.0 + STALL_SHARE * (1 + self.num_running))


@lru_cache(maxsize=65_536)
def code_of(name: str) -> int:
    """64 bits for a worker's, region's or KV format's name; the same in every process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


class WorkerTable:
    """Columns are views of the rows in use; do not keep them over a change."""

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.ids: list[str] = []
        self._row_of: dict[str, int] = {}
        self._floats = np.zeros((10, FIRST_ROWS))
        self._codes = np.zeros((2, FIRST_ROWS), dtype=np.uint64)
        self._names = np.zeros(FIRST_ROWS, dtype=np.uint64)
        self._formats: list[tuple[int, Bools | None]] | None = None
        self._use(0)
        for worker in workers:
            self.put(worker)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._row_of

    def row_of(self, worker_id: str) -> int | None:
        return self._row_of.get(worker_id)

    def holding(
        self, num_cached_blocks: Mapping[str, int], max_tokens: int
    ) -> tuple[NDArray[np.intp], Floats]:
        """Rows of the workers with cached blocks, and the tokens in them, at most `max_tokens`."""
        row_of = self._row_of
        if not num_cached_blocks:
            return _NO_ROWS, _NO_TOKENS
        held = [(row_of[name], num) for name, num in num_cached_blocks.items() if name in row_of]
        rows, num_blocks = np.array(held, dtype=np.intp).reshape(-1, 2).T
        return rows, np.minimum(num_blocks * self.block_sizes[rows], max_tokens)

    def put(self, worker: Worker) -> None:
        """Adds the worker, or writes its row anew."""
        row = self._row_of.get(worker.worker_id)
        if row is None:
            row = self._add(worker.worker_id)
        codes = code_of(worker.kv_format), code_of(worker.region)
        if codes[0] != self.format_codes[row]:
            self._formats = None
        self._codes[:, row] = codes
        block_size = worker.block_size
        self._floats[:, row] = (
            block_size,
            -1 if worker.is_avoided else worker.num_free_blocks * block_size,
            worker.num_total_blocks * block_size,
            worker.load_s,
            worker.speed.step_s,
            worker.busy_until,
            worker.closed_until,
            worker.speed.token_s,
            worker.local_token_s,
            worker.speed.push_token_s,
        )

    def remove(self, worker_id: str) -> None:
        row = self._row_of.pop(worker_id, None)
        if row is None:
            return
        last_id = self.ids.pop()
        last = len(self.ids)
        if row != last:
            self.ids[row] = last_id
            self._row_of[last_id] = row
            for columns in self._columns():
                columns[..., row] = columns[..., last]
        self._use(last)

    def first_s(self, now: float) -> Floats:
        """Until a prompt given to each now begins to be computed, and the step's own time."""
        waits: Floats = self.busy_until - now
        np.maximum(waits, 0.0, out=waits)
        waits += self.step_s
        return waits

    def formats(self) -> list[tuple[int, Bools | None]]:
        """The code of each KV format with its rows; None: all of them."""
        if self._formats is None:
            codes = np.unique(self.format_codes).tolist()
            is_one = len(codes) == 1
            self._formats = [
                (code, None if is_one else self.format_codes == code) for code in codes
            ]
        return self._formats

    def in_regions(self, regions: Collection[str]) -> Bools:
        """An unnamed region is none that a request may allow."""
        return np.isin(self.region_codes, [code_of(each) for each in regions if each])

    def has_any(self, regions: Collection[str], *, but: Collection[str]) -> bool:
        if len(self) == 0:
            return False
        usable = self.in_regions(regions) if regions else np.ones(len(self), dtype=bool)
        usable[[row for row in map(self._row_of.get, but) if row is not None]] = False
        return bool(usable.any())

    def _add(self, worker_id: str) -> int:
        row = len(self.ids)
        if row == len(self._names):
            self._grow()
        self.ids.append(worker_id)
        self._row_of[worker_id] = row
        self._names[row] = code_of(worker_id)
        self._use(row + 1)
        return row

    def _grow(self) -> None:
        doubled = [np.concatenate([each, np.zeros_like(each)], axis=-1) for each in self._columns()]
        self._floats, self._codes, self._names = doubled

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self._floats, self._codes, self._names

    def _use(self, size: int) -> None:
        """Cuts the columns to `size` rows; which rows have a format must be found anew."""
        self._formats = None
        floats = self._floats[:, :size]
        # What a worker that refused lately has free is -1: too little for anything.
        self.block_sizes, self.free_tokens, self.total_tokens = floats[:3]
        self.load_s, self.step_s, self.busy_until, self.closed_until = floats[3:7]
        self.token_s, self.local_token_s, self.push_token_s = floats[7:]
        self.format_codes, self.region_codes = self._codes[:, :size]
        self.name_hashes = self._names[:size]
