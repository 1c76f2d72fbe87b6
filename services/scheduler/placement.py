"""Chooses the worker that decodes, and those that may prefill for it: a pure function of its
arguments.

All costs are in seconds, from the measured speeds of the workers:

    local(d)   = queue(d) + step(d) + uncached(d) · token(d) · (1 + stall · (1 + running(d)))
    remote(d)  = step(d) + handoff overhead + min over p of: step(p)
                     + max(queue(p) + uncached(p) · token(p),
                           max(queue(p), link(p)) + tokens that d does not hold · push(p))
    cost(d)    = min(local, remote) + load(d): KV of d's running requests, d's waiting requests

A local prefill delays the requests that decode on the worker, and a push overlaps with computing
unless the link is slower. A p at another site is behind a link that its pushes share: link(p) is
the time until what is assigned to it has crossed, and step(p) has the round trip. A prefill worker
must compute a prefix that only decode holds, so each side is credited with its own cache. One that
also decodes costs more while it has no room for the prompt: running answers hold its blocks. The
worker with the longest prefix, or the one that the affinity key names, is preferred unless it costs
more than twice the best: affinity must not create a queue. A worker whose context does not hold the
request to its end, with all tokens that it may generate, is no candidate; neither is a worker, of
either role, without a feature that the request needs. Among other sites, whose step(d) has the
round trip, the cost alone decides. A worker with enough work gets no request: requests queued here
can still go elsewhere, and in fair order.

The search is a linear scan of all workers (`cost_kernel.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.scheduler.cost_kernel import (
    FORMAT,
    TOKEN_S,
    RequestTerms,
    RoleWorkers,
    costs_of_decodes,
    nearest_prefills,
)
from services.scheduler.worker_table import WorkerTable, code_of
from shared.subjects import site_in

MAX_COST_RATIO = 2.0
NEAR_DEEPEST = 0.9  # prefixes this close to the longest count as equally long
MAX_PREFILL_CANDIDATES = 3
MAX_SITE_ROWS = 32  # gateways of other sites that are compared, of which each site has several
# Bursts below the capacity of a site stay there: besides the round trip, a request waits for so
# long, or for as long as so many prompts of its length take.
HOME_WAIT_S, MAX_HOME_WAIT_S = 0.25, 2.0
NUM_HOME_PROMPTS = 4

RandomBelow = Callable[[int], int]  # uniform in [0, limit)


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Sizes of a request. `num_tokens` counts tokens with KV before the first new token: prompt,
    received outputs. `num_context_tokens` counts those of the longest choice at its end, except for
    its last token, which needs no KV.
    """

    num_prompt_tokens: int
    num_tokens: int
    affinity_key: str = ""
    allowed_regions: tuple[str, ...] = ()  # empty: all
    num_context_tokens: int = 0
    features: tuple[str, ...] = ()  # features that its workers must have
    is_from_site: bool = False  # no third site computes the prompt of another site's request
    num_room_tokens: int = 0  # of a move: those for which its worker has free blocks

    def num_blocks(self, block_size: int) -> int:
        return -(-max(self.num_tokens + 1, self.num_room_tokens) // block_size)


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """The limits of local prefill on decode, in uncached tokens: up to `always` in any case, up to
    `at_most` if local prefill is cheaper.
    """

    always: int
    at_most: int


@dataclass(frozen=True, slots=True)
class Target:
    decode_id: str
    prefill_candidates: tuple[str, ...]  # best first; empty: local prefill
    num_blocks: int
    num_uncached_tokens: int  # tokens to compute on the worker that computes the prompt
    has_unlike_prefill: bool = False  # local prefill, as decode may use no prefill worker's KV
    num_pushed_tokens: int = 0  # tokens whose KV the prefill worker sends


@dataclass(frozen=True, slots=True)
class ModelWorkers:
    """The live workers of one model, and the cost of a handoff besides computing,
    `handoff_overhead_s`.
    """

    decodes: WorkerTable
    prefills: WorkerTable
    handoff_overhead_s: float


def place(
    needs: RequestSize,
    workers: ModelWorkers,
    num_cached_blocks: Mapping[str, int],
    *,
    local_prefill: LocalPrefill,
    now: float,
    random_below: RandomBelow,
    excluded: Collection[str] = (),
    prefers_holders: bool = True,
) -> Target | None:
    """Returns the best worker with room and time for the request, or None. Workers in `excluded`
    do not decode, and prefill nothing of a move: its prompt would wait for room there as well.
    Without `prefers_holders` it is the one with the least cost, whatever it holds.
    """
    full = excluded if needs.num_room_tokens else ()
    decision = Decision(needs, workers, num_cached_blocks, local_prefill, now, random_below, full)
    return decision.target(excluded, prefers_holders=prefers_holders)


def leaves_home(
    waited_s: float, round_trip_s: float, prompt_s: float, *, is_served_here: bool
) -> bool:
    """Whether a request without room at its site, whose prompt takes `prompt_s` here, may be placed
    at another one, which is `round_trip_s` away: no worker here could decode it, or it has waited
    for longer than that.
    """
    wait_s = min(max(HOME_WAIT_S, NUM_HOME_PROMPTS * prompt_s), MAX_HOME_WAIT_S)
    return not is_served_here or waited_s >= wait_s + round_trip_s


def prompt_s(workers: ModelWorkers, num_tokens: int) -> float:
    """Returns the seconds in which the fastest worker computes so many tokens; 0 without one."""
    tables = (each for each in (workers.decodes, workers.prefills) if len(each))
    token_s = (float(each.columns.floats[TOKEN_S, : len(each)].min()) for each in tables)
    return num_tokens * min(token_s, default=0.0)


class Decision:
    """The cost of one request on each worker, and the choice of a worker."""

    def __init__(
        self,
        needs: RequestSize,
        workers: ModelWorkers,
        num_cached_blocks: Mapping[str, int],
        local_prefill: LocalPrefill,
        now: float,
        random_below: RandomBelow,
        full: Collection[str] = (),
    ) -> None:
        """Workers in `full` prefill nothing."""
        self._needs, self._random_below = needs, random_below
        self._decodes, self._prefills = workers.decodes, workers.prefills
        limits = needs.allowed_regions, needs.features
        seen_by = num_cached_blocks, needs.num_prompt_tokens - 1, *limits
        self._decode_side = workers.decodes.side(*seen_by)
        self._prefill_side = workers.prefills.side(*seen_by, is_local=needs.is_from_site, but=full)
        self._terms = RequestTerms(
            num_tokens_to_compute=float(
                needs.num_tokens - 1
            ),  # decode always computes the last token
            num_tokens=float(needs.num_tokens),
            num_context_tokens=float(needs.num_context_tokens),
            free_local_tokens=float(local_prefill.always),
            max_local_tokens=float(local_prefill.at_most),
            handoff_overhead_s=workers.handoff_overhead_s,
            now=now,
        )

    def target(self, excluded: Collection[str], *, prefers_holders: bool = True) -> Target | None:
        if not len(self._decodes):
            return None
        cost, is_remote, first, num_equal = costs_of_decodes(
            self._decode_side, self._prefill_side, self._terms, self._decodes.rows_of(excluded)
        )
        if cost[first] == np.inf:
            return None
        row = self._preferred(cost) if prefers_holders else None
        if row is None or cost[row] > MAX_COST_RATIO * cost[first]:
            row = first if num_equal == 1 else self._random_row(cost == cost[first])
        return self._target(row, is_remote=is_remote[row])

    # ── the choice ───────────────────────────────────────────────────────────────────────────────

    def _random_row(self, equals: NDArray[np.bool_]) -> int:
        rows = np.flatnonzero(equals)
        return int(rows[self._random_below(len(rows))])

    def _preferred(self, cost: NDArray[np.float64]) -> int | None:
        """Returns a worker with about the longest prefix: the one that the affinity key names, else
        the cheapest. Without a cached prefix it is the affinity key's worker.
        """
        holders, held_tokens = self._decode_side.holders, self._decode_side.held_tokens
        if not len(holders):
            return self._named(cost)
        cost_of_holders = cost[holders]
        is_usable = cost_of_holders < np.inf
        if not is_usable.any():
            return self._named(cost)
        deepest = held_tokens[is_usable].max()
        if deepest == 0:
            return self._named(cost)
        is_near = is_usable & (held_tokens >= NEAR_DEEPEST * deepest)
        near, cost_of_near = holders[is_near], cost_of_holders[is_near]
        named = self._named(cost)
        return named if named in near else int(near[cost_of_near.argmin()])

    def _named(self, cost: NDArray[np.float64]) -> int | None:
        """Returns the row that the affinity key names, if there is a key, by highest random weight
        hashing: losing a worker moves only that worker's sessions.
        """
        if not self._needs.affinity_key:
            return None
        weights = _mixed(self._decodes.name_codes ^ np.uint64(code_of(self._needs.affinity_key)))
        weights[cost == np.inf] = 0
        return int(weights.argmax())

    def _target(self, row: int, *, is_remote: bool) -> Target:
        decodes, prefills = self._decodes, self._prefills
        num_uncached = num_missing = self._num_uncached(self._decode_side, row)
        candidates = self._candidates(row, num_uncached) if is_remote else []
        if candidates:
            num_uncached = self._num_uncached(self._prefill_side, candidates[0])
        return Target(
            decode_id=decodes.ids[row],
            prefill_candidates=tuple(prefills.ids[each] for each in candidates),
            num_blocks=self._needs.num_blocks(int(decodes.block_sizes[row])),
            num_uncached_tokens=int(num_uncached),
            has_unlike_prefill=self._has_unlike_prefill(row, num_uncached),
            num_pushed_tokens=int(num_missing) if candidates else 0,
        )

    def _has_unlike_prefill(self, row: int, num_uncached: float) -> bool:
        if num_uncached <= self._terms.free_local_tokens or not len(self._prefills):
            return False
        formats = self._prefills.columns.codes[FORMAT, : len(self._prefills)]
        if len(self._prefill_side.is_allowed):
            formats = formats[self._prefill_side.is_allowed]
        return len(formats) > 0 and self._decodes.columns.codes[FORMAT, row] not in formats

    def _candidates(self, row: int, num_uncached: float) -> list[int]:
        """Returns the rows of prefill workers for a row of decode, best first; ties
        in random order. A site has one: its gateways fail together.
        """
        format_code, turn = (
            self._decodes.columns.codes[FORMAT, row],
            self._random_below(len(self._prefills)),
        )
        rows, _ = nearest_prefills(
            self._prefill_side,
            self._terms,
            format_code,
            num_uncached,
            turn,
            MAX_PREFILL_CANDIDATES + 1 + min(self._prefills.num_at_sites, MAX_SITE_ROWS),
        )
        itself = self._prefills.row_of(self._decodes.ids[row])
        ids, by_site = self._prefills.ids, dict[str, int]()
        for each in rows.tolist():
            if each >= 0 and each != itself:
                by_site.setdefault(site_in(ids[each]) or ids[each], each)
        return list(by_site.values())[:MAX_PREFILL_CANDIDATES]

    def _num_uncached(self, side: RoleWorkers, row: int) -> float:
        if not len(side.holders):
            return self._terms.num_tokens_to_compute
        return self._terms.num_tokens_to_compute - float(
            side.held_tokens[side.holders == row].sum()
        )


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns splitmix64's last steps: each input bit affects all output bits
    (Steele et al., 2014).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
