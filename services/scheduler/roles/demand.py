"""Computes the workers that one model's work needs, by role: a pure function of measurements.

    prefill = Σ over workers of prompt tokens/s · token_s
              + (tokens in flight + queued tokens · uncached share) · token_s / CLEAR_S
    decode  = Σ over decoding workers of max(blocks in use / all blocks,
                                             (step time − step_s) / (target ITL − step_s))
              + blocks of queued requests / blocks of a worker

Both count busy workers (Erlangs): the first term is work that is done now, the second what waits.
The queue waits for one role: for decode where no decoding worker has room or time, else for
prefill. A step takes step_s + sampling_s · rows, so the share of the target ITL that is used is
linear in rows, and a worker at 1 has as many streams as its target allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.throughput import Speed

CLEAR_S = 2.0  # a backlog shall be done within so long
FULL = 0.95  # a decoding worker with this load has no room or time for another stream
MIN_SPAN_S = 1e-3  # smallest difference of the target ITL and a step's fixed time


@dataclass(frozen=True, slots=True)
class WorkerWork:
    """Recent work of one worker, and the requests that it holds."""

    worker_id: str
    roles: tuple[str, ...]
    group: str  # workers of one group may replace each other: region, KV format, numerics
    can_change: bool
    speed: Speed
    prompt_tokens_per_s: float
    step_time_s: float  # mean of its steps, without computing prompts; 0 while idle
    prefill_tokens_in_flight: int
    num_running: int
    num_used_blocks: int
    num_total_blocks: int

    def decode_load(self, target_itl_s: float) -> float:
        """Returns the worker's share of its limit: 1 with as many streams as its blocks or the
        target allow.
        """
        held = self.num_used_blocks / max(1, self.num_total_blocks)
        if not self.num_running:
            return held
        span_s = max(target_itl_s - self.speed.step_s, MIN_SPAN_S)
        return max(held, min(2.0, (self.step_time_s - self.speed.step_s) / span_s))


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """Requests of one model that wait in this scheduler."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_blocks: int = 0  # blocks of their prompts
    uncached_share: float = 1.0


@dataclass(frozen=True, slots=True)
class WorkerDemand:
    """Busy workers by role, and the time that one worker needs for what waits here, `queued_s`."""

    prefill: float
    decode: float
    waits_for: str  # the role that queued requests wait for
    queued_s: float


def demand_of(
    workers: Sequence[WorkerWork], queued: QueuedWork, *, target_itl_s: float
) -> WorkerDemand:
    decoding = [each for each in workers if "decode" in each.roles]
    loads = [each.decode_load(target_itl_s) for each in decoding]
    is_decode_full = bool(loads) and min(loads) >= FULL
    token_s = _mean_token_s(workers)
    queued_s = queued.num_prompt_tokens * queued.uncached_share * token_s
    prefill = sum(each.prompt_tokens_per_s * each.speed.token_s for each in workers)
    in_flight_s = sum(each.prefill_tokens_in_flight * each.speed.token_s for each in workers)
    decode = sum(loads)
    if is_decode_full:
        decode += queued.num_blocks / _mean_blocks(decoding)
    else:
        in_flight_s += queued_s
    return WorkerDemand(
        prefill=prefill + in_flight_s / CLEAR_S,
        decode=decode,
        waits_for="decode" if is_decode_full else "prefill",
        queued_s=queued_s,
    )


def _mean_token_s(workers: Sequence[WorkerWork]) -> float:
    if not workers:
        return 0.0
    return sum(each.speed.token_s for each in workers) / len(workers)


def _mean_blocks(workers: Sequence[WorkerWork]) -> float:
    return max(1.0, sum(each.num_total_blocks for each in workers) / len(workers))
