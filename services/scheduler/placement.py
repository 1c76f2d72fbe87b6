"""Which worker decodes, and which ones may prefill for it: a pure function of what is known.

Everything is counted in seconds, by the speeds that the workers were measured at:

    local(d)   = queue(d) + step(d) + uncached(d) · token(d) · (1 + stall · (1 + running(d)))
    remote(d)  = step(d) + hop + min over p of: queue(p) + step(p)
                     + max(uncached(p) · token(p), tokens that d does not hold · push(p))
    cost(d)    = min(local, remote) + load(d): KV of d's running requests, those not started there

A prompt that is computed where others decode makes them wait, and a push hides behind computing
unless the link is slower. Prefill must read a prefix that only decode holds, so each side is
credited with its own cache. A worker with the longest prefix, or the one that the affinity key
names, is kept unless it costs more than twice the best: affinity must not make a queue. Who has
enough to do gets nothing: what waits here can still go elsewhere, and in a fair order.

It is a plain scan of all workers, in vectors: about 50 µs for 1,000 of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.scheduler.handoffs import CLOSED_S, Handoffs, handoffs_to
from services.scheduler.worker_table import Bools, Floats, WorkerTable, code_of

MAX_COST_RATIO = 2.0
NEAR_DEEPEST = 0.9  # prefixes this close to the longest count as equally long


Draw = Callable[[int], int]  # uniform in [0, limit)


@dataclass(frozen=True, slots=True)
class Needs:
    """`num_tokens` need KV before the first new token: the prompt and all received outputs."""

    num_prompt_tokens: int
    num_tokens: int
    affinity_key: str = ""
    allowed_regions: tuple[str, ...] = ()  # none: all

    def num_blocks(self, block_size: int) -> int:
        return -(-(self.num_tokens + 1) // block_size)


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """Of how many uncached tokens decode computes the prompt itself: up to `always` in any case, up
    to `at_most` where that is cheaper.
    """

    always: int
    at_most: int


@dataclass(frozen=True, slots=True)
class Target:
    decode_id: str
    prefill_candidates: tuple[str, ...]  # best first; none: local prefill
    num_blocks: int
    num_uncached_tokens: int  # for whoever computes the prompt


@dataclass(frozen=True, slots=True)
class Workers:
    """The live workers of one model; `hop_s` is what a handoff costs beyond computing."""

    decodes: WorkerTable
    prefills: WorkerTable
    hop_s: float


def place(
    needs: Needs,
    workers: Workers,
    num_cached_blocks: Mapping[str, int],
    *,
    local_prefill: LocalPrefill,
    now: float,
    draw: Draw,
    excluded: Collection[str] = (),
) -> Target | None:
    """The best worker that has room and time for the request. `excluded` are not to decode."""
    decision = Decision(needs, workers, num_cached_blocks, local_prefill, now, draw)
    return decision.target(excluded)


class Decision:
    """The columns that one request adds to those of the workers."""

    def __init__(
        self,
        needs: Needs,
        workers: Workers,
        num_cached_blocks: Mapping[str, int],
        local_prefill: LocalPrefill,
        now: float,
        draw: Draw,
    ) -> None:
        self._needs = needs
        self._decodes, self._prefills, self._hop_s = (
            workers.decodes,
            workers.prefills,
            workers.hop_s,
        )
        self._num_cached_blocks = num_cached_blocks
        self._local_prefill = local_prefill
        self._now = now
        self._draw = draw
        self._todo = needs.num_tokens - 1  # the last token is decode's in any case
        self._holders, self._held_tokens = self._held(self._decodes)
        self._uncached = self._without_cached(self._decodes, self._holders, self._held_tokens)
        self._handoffs: dict[int, Handoffs] = {}  # by the KV format they are pushed in

    def target(self, excluded: Collection[str]) -> Target | None:
        decodes = self._decodes
        if not len(decodes):
            return None
        cost = decodes.first_s(self._now) + self._uncached * decodes.local_token_s
        usable = decodes.closed_until <= self._now
        is_remote = np.zeros(len(decodes), dtype=bool)
        if len(self._prefills) and self._todo > self._local_prefill.always:
            for code, rows in decodes.formats():
                self._consider_handoff(code, rows, cost, usable, is_remote)
        cost += decodes.load_s
        self._strike_out(usable, excluded)
        np.putmask(cost, ~usable, np.inf)
        row = self._best(cost)
        return None if row is None else self._target(row, bool(is_remote[row]))

    def _held(self, table: WorkerTable) -> tuple[NDArray[np.intp], Floats]:
        return table.holding(self._num_cached_blocks, self._needs.num_prompt_tokens - 1)

    def _without_cached(
        self, table: WorkerTable, holders: NDArray[np.intp], held_tokens: Floats
    ) -> Floats:
        uncached = np.full(len(table), float(self._todo))
        if len(holders):
            uncached[holders] -= held_tokens
        return uncached

    def _strike_out(self, usable: Bools, excluded: Collection[str]) -> None:
        decodes, regions = self._decodes, self._needs.allowed_regions
        usable &= decodes.free_tokens > self._needs.num_tokens
        if regions:
            usable &= decodes.in_regions(regions)
        for worker_id in excluded:
            row = decodes.row_of(worker_id)
            if row is not None:
                usable[row] = False

    # ── prefill elsewhere ────────────────────────────────────────────────────────────────────────

    def _consider_handoff(
        self, format_code: int, rows: Bools | None, cost: Floats, usable: Bools, is_remote: Bools
    ) -> None:
        """Writes a handoff's cost into the rows where it is the better way."""
        handoffs = self._handoffs[format_code] = self._handoffs_to(format_code)
        seconds = self._remote_seconds(handoffs)
        is_open = seconds < CLOSED_S
        if not is_open.all():
            np.subtract(seconds, CLOSED_S, out=seconds, where=~is_open)
        better = seconds < cost
        if self._todo > self._local_prefill.at_most:
            better |= self._uncached > self._local_prefill.at_most
            better &= seconds < np.inf
        if len(self._holders):
            better &= self._uncached > self._local_prefill.always
        if rows is not None:
            better &= rows
        np.copyto(cost, seconds, where=better)
        np.copyto(usable, is_open, where=better)
        is_remote |= better

    def _handoffs_to(self, format_code: int) -> Handoffs:
        prefills = self._prefills
        return handoffs_to(
            format_code,
            prefills,
            [float(self._todo), *sorted(set((self._todo - self._held_tokens).tolist()))],
            self._without_cached(prefills, *self._held(prefills)),
            min_total_tokens=self._needs.num_tokens + 1,
            allowed_regions=self._needs.allowed_regions,
            now=self._now,
        )

    def _remote_seconds(self, handoffs: Handoffs) -> Floats:
        """By row of decode. A worker with both roles does not push to itself."""
        best_rows, best_s = handoffs.best()
        extra_s = self._hop_s + self._decodes.step_s  # the last token takes a step of its own
        seconds = best_s[0] + extra_s
        if len(self._holders):
            lacks = self._todo - self._held_tokens
            own = best_s[1 + np.searchsorted(handoffs.lacks[1:], lacks)]
            seconds[self._holders] = own + extra_s[self._holders]
        for lack, best_row in zip(handoffs.lacks, best_rows.tolist(), strict=True):
            twin = self._decodes.row_of(self._prefills.ids[best_row])
            if twin is not None and self._uncached[twin] == lack:
                others = np.delete(handoffs.seconds_of(lack), best_row)
                seconds[twin] = others.min(initial=np.inf) + extra_s[twin]
        return seconds

    # ── the choice ───────────────────────────────────────────────────────────────────────────────

    def _best(self, cost: Floats) -> int | None:
        """Equal ones by lot."""
        least = cost.min()
        if least == np.inf:
            return None
        preferred = self._preferred(cost)
        if preferred is not None and cost[preferred] <= MAX_COST_RATIO * least:
            return preferred
        equals = np.flatnonzero(cost == least)
        return int(equals[self._draw(len(equals)) if len(equals) > 1 else 0])

    def _preferred(self, cost: Floats) -> int | None:
        """Of those with about the longest prefix the one that the affinity key names, else the
        cheapest; without any, the affinity key's.
        """
        if not len(self._holders):
            return self._named(cost)
        cost_of_holders = cost[self._holders]
        is_usable = cost_of_holders < np.inf
        if not is_usable.any():
            return self._named(cost)
        deepest = self._held_tokens[is_usable].max()
        if deepest == 0:
            return self._named(cost)
        is_near = is_usable & (self._held_tokens >= NEAR_DEEPEST * deepest)
        near, cost_of_near = self._holders[is_near], cost_of_holders[is_near]
        named = self._named(cost)
        return named if named in near else int(near[cost_of_near.argmin()])

    def _named(self, cost: Floats) -> int | None:
        """Highest random weight: a lost worker moves only its own sessions."""
        if not self._needs.affinity_key:
            return None
        weights = _mixed(self._decodes.name_hashes ^ np.uint64(code_of(self._needs.affinity_key)))
        weights[cost == np.inf] = 0
        return int(weights.argmax())

    def _target(self, row: int, is_remote: bool) -> Target:
        decodes, candidates, num_uncached = self._decodes, list[int](), self._uncached[row]
        if is_remote:
            handoffs = self._handoffs[int(decodes.format_codes[row])]
            own = self._prefills.row_of(decodes.ids[row])
            candidates = handoffs.candidates(num_uncached, but=own, draw=self._draw)
            num_uncached = handoffs.uncached[candidates[0]]
        return Target(
            decode_id=decodes.ids[row],
            prefill_candidates=tuple(self._prefills.ids[each] for each in candidates),
            num_blocks=self._needs.num_blocks(int(decodes.block_sizes[row])),
            num_uncached_tokens=int(num_uncached),
        )


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's last steps: each bit of a word moves all others (Steele et al., 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
