"""What it takes to have a prompt computed by each prefill worker and pushed to decode."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.scheduler.worker_table import Floats, WorkerTable

MAX_PREFILL_CANDIDATES = 3
CLOSED_S = 1e6  # added to those that have enough to do: the others come first


@dataclass(frozen=True, slots=True)
class Handoffs:
    """`seconds[i, row]`: from a prefill worker to a decode worker that lacks `lacks[i]` tokens,
    infinite where it cannot be; `uncached[row]`: tokens that the prefill worker computes.
    """

    lacks: list[float]
    seconds: Floats
    uncached: Floats

    def seconds_of(self, lack: float) -> Floats:
        return self.seconds[self.lacks.index(lack)]

    def best(self) -> tuple[NDArray[np.intp], Floats]:
        """For each of `lacks` the best row, and its seconds."""
        rows = self.seconds.argmin(axis=1)
        return rows, self.seconds[np.arange(len(rows)), rows]

    def candidates(self, lack: float, *, but: int | None, draw: Callable[[int], int]) -> list[int]:
        """Rows, best first, equal ones by lot: the rows are turned by a random number first."""
        size = self.seconds.shape[1]
        turn = draw(size)
        seconds = self.seconds_of(lack)
        seconds = np.concatenate((seconds[turn:], seconds[:turn]))
        wanted = min(MAX_PREFILL_CANDIDATES + 1, size)
        turned = np.argpartition(seconds, wanted - 1)[:wanted]
        turned = turned[np.argsort(seconds[turned], kind="stable")]
        rows = [(each + turn) % size for each in turned.tolist() if seconds[each] < np.inf]
        return [row for row in rows if row != but][:MAX_PREFILL_CANDIDATES]


def handoffs_to(
    format_code: int,
    prefills: WorkerTable,
    lacks: list[float],
    uncached: Floats,
    *,
    min_total_tokens: int,
    allowed_regions: Collection[str],
    now: float,
) -> Handoffs:
    """Into one KV format. Computing and pushing go on at once: the slower one counts."""
    push_s = np.multiply.outer(lacks, prefills.push_token_s)
    seconds: Floats = prefills.first_s(now) + np.maximum(uncached * prefills.token_s, push_s)
    is_closed = prefills.closed_until > now
    if is_closed.any():
        seconds += is_closed * CLOSED_S
    fits = prefills.total_tokens >= min_total_tokens
    fits &= prefills.format_codes == np.uint64(format_code)
    if allowed_regions:
        fits &= prefills.in_regions(allowed_regions)
    if not fits.all():
        seconds[:, ~fits] = np.inf
    return Handoffs(lacks, seconds, uncached)
