"""Computes the rates of workers from the counters in their heartbeats of the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.scheduler.backlog import ModelKey, model_key
from services.scheduler.roles.demand import WorkerWork
from services.scheduler.throughput import Speed
from shared.messages import Heartbeat, WorkerLoad

WINDOW_S = 2.0


@dataclass(slots=True)
class _Measured:
    model: ModelKey
    heartbeat: Heartbeat
    loads: deque[tuple[float, WorkerLoad]] = field(default_factory=deque)

    def add(self, load: WorkerLoad, now: float) -> None:
        loads = self.loads
        # Another process counts its steps anew.
        if loads and load.num_busy_steps < loads[-1][1].num_busy_steps:
            loads.clear()
        loads.append((now, load))
        while now - loads[0][0] > WINDOW_S:
            loads.popleft()

    @property
    def ends(self) -> tuple[float, WorkerLoad, WorkerLoad]:
        """The seconds between the first and the last load, and both loads."""
        (began, first), (ended, last) = self.loads[0], self.loads[-1]
        return ended - began, first, last


class WorkerRates:
    def __init__(self, speed_of: Callable[[str], Speed]) -> None:
        self._speed_of = speed_of
        self._measured: dict[str, _Measured] = {}

    def on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Records the heartbeat of a live worker that accepts requests."""
        card, load = heartbeat.model, heartbeat.load
        if card is None or load is None:
            return
        worker_id, model = heartbeat.process_id, model_key(card)
        measured = self._measured.get(worker_id)
        if measured is None or measured.model != model:
            measured = self._measured[worker_id] = _Measured(model, heartbeat)
        measured.heartbeat = heartbeat
        measured.add(load, now)

    def lost(self, worker_id: str) -> None:
        self._measured.pop(worker_id, None)

    def models(self) -> set[ModelKey]:
        return {each.model for each in self._measured.values()}

    def workers(self, model: ModelKey) -> list[WorkerWork]:
        return [self._work_of(each) for each in self._of(model)]

    def uncached_share(self, model: ModelKey) -> float:
        """Returns the uncached share of prompt tokens admitted lately, or 1 without any."""
        num_prompt = num_cached = 0
        for each in self._of(model):
            _, first, last = each.ends
            num_prompt += last.num_prompt_tokens - first.num_prompt_tokens
            num_cached += last.num_cached_prompt_tokens - first.num_cached_prompt_tokens
        if num_prompt <= 0:
            return 1.0
        return min(1.0, max(0.0, 1.0 - num_cached / num_prompt))

    def _of(self, model: ModelKey) -> Iterator[_Measured]:
        return (each for each in self._measured.values() if each.model == model)

    def _work_of(self, measured: _Measured) -> WorkerWork:
        span_s, first, last = measured.ends
        num_steps = last.num_busy_steps - first.num_busy_steps
        num_prompt = last.num_computed_prompt_tokens - first.num_computed_prompt_tokens
        beat = measured.heartbeat
        speed = self._speed_of(beat.process_id)
        # prompts that a decode worker computes are work of prefill
        decode_s = last.busy_s - first.busy_s - num_prompt * speed.token_s
        card = beat.model
        assert card is not None
        return WorkerWork(
            worker_id=beat.process_id,
            roles=tuple(beat.roles),
            group=f"{beat.region} {card.kv_format} {card.numerics.kv_key}",
            can_change=bool(beat.possible_roles),
            speed=speed,
            prompt_tokens_per_s=num_prompt / span_s if span_s > 0 else 0.0,
            step_time_s=max(0.0, decode_s) / num_steps if num_steps > 0 else 0.0,
            prefill_tokens_in_flight=last.prefill_tokens_in_flight,
            num_running=last.num_running,
            num_used_blocks=last.num_total_blocks - last.num_free_blocks,
            num_total_blocks=last.num_total_blocks,
        )
