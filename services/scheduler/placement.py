"""Which worker decodes, and which ones may prefill for it: a pure function of what is known.

Everything is counted in tokens of prefill work, the unit in which the queues are known:

    local(d)   = queue(d) + uncached(d)
    remote(p)  = queue(p) + uncached(p) + PUSH_COST · tokens that d does not hold
    cost(d)    = BASE + min(local or remote) + DECODE_COST · KV of d's running requests
                 + WAITING_COST · requests that d has not started

Prefill must read a prefix that only decode holds, so each side is credited with its own cache.
`local` stands only where the uncached rest is short or no prefill worker fits. A worker with the
longest prefix, or the one that the affinity key names, is kept unless it costs more than twice the
best: affinity must not make a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

BASE_COST = 64.0  # a request is never free: keeps "twice the best" meaningful on idle workers
PUSH_COST = 0.05  # moving a token's KV against computing it
DECODE_COST = 0.05
WAITING_COST = 256.0
MAX_COST_RATIO = 2.0
NEAR_DEEPEST = 0.9  # prefixes this close to the longest count as equally long
MAX_PREFILL_CANDIDATES = 3


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker as placement sees it: its last heartbeat and what was placed since."""

    worker_id: str
    kv_format: str
    block_size: int
    num_free_blocks: int
    num_total_blocks: int
    num_waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Needs:
    """`num_tokens` need KV before the first new token: the prompt and all received outputs."""

    num_prompt_tokens: int
    num_tokens: int
    affinity_key: str = ""

    def num_blocks(self, block_size: int) -> int:
        return -(-(self.num_tokens + 1) // block_size)


@dataclass(frozen=True, slots=True)
class Target:
    decode: Worker
    prefill_candidates: tuple[str, ...]  # best first; none: local prefill
    num_blocks: int
    num_uncached_tokens: int  # for whoever computes the prompt


@dataclass(frozen=True, slots=True)
class _Rated:
    cost: float
    target: Target
    num_cached_tokens: int


Draw = Callable[[int], int]  # uniform in [0, limit)


def place(
    needs: Needs,
    decodes: Sequence[Worker],
    prefills: Sequence[Worker],
    num_cached_blocks: Mapping[str, int],
    *,
    local_prefill_tokens: int,
    draw: Draw,
) -> list[Target]:
    """Decode workers with room for the request, best first; empty if none has room."""
    rated = []
    for decode in decodes:
        if needs.num_blocks(decode.block_size) <= decode.num_free_blocks:
            rated.append(
                _rate(needs, decode, prefills, num_cached_blocks, local_prefill_tokens, draw)
            )
    rated.sort(key=lambda each: (each.cost, each.target.decode.decode_tokens, draw(1 << 30)))
    preferred = _preferred(needs, rated)
    if preferred is not None and preferred.cost <= MAX_COST_RATIO * rated[0].cost:
        rated.remove(preferred)
        rated.insert(0, preferred)
    return [each.target for each in rated]


def _rate(
    needs: Needs,
    decode: Worker,
    prefills: Sequence[Worker],
    num_cached_blocks: Mapping[str, int],
    local_prefill_tokens: int,
    draw: Draw,
) -> _Rated:
    cached = _cached_tokens(needs, decode, num_cached_blocks)
    uncached = needs.num_tokens - 1 - cached
    remote = []
    if uncached > local_prefill_tokens:
        remote = _remote(needs, decode, prefills, num_cached_blocks, draw)
    work = decode.prefill_tokens + uncached
    to_compute = uncached
    if remote:
        best_cost, to_compute, _ = remote[0]
        work = int(best_cost + PUSH_COST * uncached)
    load = DECODE_COST * decode.decode_tokens + WAITING_COST * decode.num_waiting
    target = Target(
        decode=decode,
        prefill_candidates=tuple(worker_id for _, _, worker_id in remote),
        num_blocks=needs.num_blocks(decode.block_size),
        num_uncached_tokens=to_compute,
    )
    return _Rated(BASE_COST + work + load, target, cached)


def _remote(
    needs: Needs,
    decode: Worker,
    prefills: Sequence[Worker],
    num_cached_blocks: Mapping[str, int],
    draw: Draw,
) -> list[tuple[int, int, str]]:
    """(cost, tokens to compute, worker id) of those that can push KV into `decode`, best first."""
    rated = []
    for prefill in prefills:
        fits = prefill.kv_format == decode.kv_format and prefill.worker_id != decode.worker_id
        if fits and needs.num_blocks(prefill.block_size) <= prefill.num_total_blocks:
            uncached = needs.num_tokens - 1 - _cached_tokens(needs, prefill, num_cached_blocks)
            cost = prefill.prefill_tokens + uncached
            rated.append((cost, draw(1 << 30), uncached, prefill.worker_id))
    rated.sort()
    return [(cost, todo, name) for cost, _, todo, name in rated[:MAX_PREFILL_CANDIDATES]]


def _cached_tokens(needs: Needs, worker: Worker, num_cached_blocks: Mapping[str, int]) -> int:
    """Of all but the last token, which decode computes in any case."""
    cached = num_cached_blocks.get(worker.worker_id, 0) * worker.block_size
    return max(0, min(cached, needs.num_prompt_tokens - 1))


def _preferred(needs: Needs, rated: Sequence[_Rated]) -> _Rated | None:
    """The cheapest of those with about the longest prefix; without any, the affinity key's."""
    deepest = max((each.num_cached_tokens for each in rated), default=0)
    if deepest > 0:
        return next(each for each in rated if each.num_cached_tokens >= NEAR_DEEPEST * deepest)
    if not needs.affinity_key or not rated:
        return None
    return max(rated, key=lambda each: _rendezvous(needs.affinity_key, each.target.decode))


def _rendezvous(affinity_key: str, worker: Worker) -> bytes:
    """Highest random weight: a lost worker moves only its own sessions."""
    name = f"{affinity_key}\0{worker.worker_id}"
    return blake2b(name.encode(), digest_size=8).digest()
