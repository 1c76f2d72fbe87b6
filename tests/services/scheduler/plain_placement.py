"""The placement rule without vectors: computes the cost of every pair of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from services.scheduler.cost_kernel import FULL_S
from services.scheduler.placement import MAX_COST_RATIO, NEAR_DEEPEST, LocalPrefill, RequestSize
from services.scheduler.worker_table import MAX_AHEAD_S, WorkerRow


@dataclass(frozen=True, slots=True)
class PrefillOption:
    """A local or remote prefill of the prompt for one decode worker."""

    seconds: float
    has_time: bool
    is_remote: bool


@dataclass(frozen=True)
class PlainScan:
    needs: RequestSize
    decodes: Sequence[WorkerRow]
    prefills: Sequence[WorkerRow]
    num_cached_blocks: Mapping[str, int]
    handoff_overhead_s: float
    local_prefill: LocalPrefill
    now: float
    excluded: frozenset[str] = frozenset()

    def uncached(self, worker: WorkerRow) -> int:
        cached = self.num_cached_blocks.get(worker.worker_id, 0) * worker.block_size
        return self.needs.num_tokens - 1 - min(cached, self.needs.num_prompt_tokens - 1)

    def first_s(self, worker: WorkerRow) -> float:
        return max(0.0, worker.busy_until - self.now) + worker.speed.step_s

    def has_time(self, worker: WorkerRow) -> bool:
        return not worker.speed.is_measured or worker.busy_until - MAX_AHEAD_S <= self.now

    def is_allowed(self, worker: WorkerRow) -> bool:
        regions = self.needs.allowed_regions
        is_in_regions = not regions or (worker.region != "" and worker.region in regions)
        return is_in_regions and set(self.needs.features) <= worker.features

    def handoffs(self, decode: WorkerRow) -> list[tuple[bool, float, str]]:
        """(has no time, seconds, worker id), best first."""
        found = []
        for prefill in self.prefills:
            fits = prefill.kv_format == decode.kv_format and self.is_allowed(prefill)
            fits &= prefill.worker_id != decode.worker_id
            if fits and self.needs.num_blocks(prefill.block_size) <= prefill.num_total_blocks:
                queued_s = max(0.0, prefill.busy_until - self.now)
                link_s = max(0.0, prefill.push_free_at - self.now)
                computed_s = queued_s + self.uncached(prefill) * prefill.speed.token_s
                push_s = self.uncached(decode) * prefill.speed.push_token_s
                seconds = (
                    decode.speed.step_s
                    + self.handoff_overhead_s
                    + prefill.speed.step_s
                    + max(computed_s, max(queued_s, link_s) + push_s)
                )
                has_room = prefill.num_free_tokens >= self.uncached(prefill)
                if prefill.also_decodes and not has_room:
                    seconds += FULL_S
                found.append((not self.has_time(prefill), seconds, prefill.worker_id))
        return sorted(found)

    def prefill_option(self, decode: WorkerRow) -> PrefillOption:
        uncached = self.uncached(decode)
        local = PrefillOption(
            self.first_s(decode) + uncached * decode.local_token_s, self.has_time(decode), False
        )
        handoffs = self.handoffs(decode)
        if uncached <= self.local_prefill.always or not handoffs:
            return local
        has_no_time, seconds, _ = handoffs[0]
        if seconds < local.seconds or uncached > self.local_prefill.at_most:
            return PrefillOption(seconds, not has_no_time, True)
        return local

    def cost(self, decode: WorkerRow) -> float:
        """Returns seconds; infinity if the worker cannot take the request now."""
        is_unused = decode.num_free_blocks >= decode.num_total_blocks
        has_room = is_unused or self.needs.num_blocks(decode.block_size) <= decode.num_free_blocks
        context = min(decode.max_context_tokens, decode.num_total_blocks * decode.block_size)
        has_room &= self.needs.num_context_tokens <= context
        is_usable = has_room and not decode.is_avoided and self.is_allowed(decode)
        prefill_option = self.prefill_option(decode)
        if not is_usable or decode.worker_id in self.excluded or not prefill_option.has_time:
            return inf
        return prefill_option.seconds + decode.load_s

    def best(self) -> set[str]:
        """Returns the ids of all workers that may be chosen without an affinity key."""
        costs = {each.worker_id: self.cost(each) for each in self.decodes}
        costs = {name: cost for name, cost in costs.items() if cost < inf}
        if not costs:
            return set()
        least = min(costs.values())
        held = {
            each.worker_id: self.needs.num_tokens - 1 - self.uncached(each)
            for each in self.decodes
            if each.worker_id in costs
        }
        deepest = max(held.values())
        if deepest > 0:
            near = {name: costs[name] for name in costs if held[name] >= NEAR_DEEPEST * deepest}
            least_near = min(near.values())
            if least_near <= MAX_COST_RATIO * least:
                return {name for name, cost in near.items() if is_close(cost, least_near)}
        return {name for name, cost in costs.items() if is_close(cost, least)}


def is_close(one: float, other: float) -> bool:
    """The cost kernel adds 1e6 s to prefill workers with enough work, which rounds their cost."""
    return abs(one - other) < 1e-8
