"""Devices on a virtual clock, at the level of requests.

The hot models of a device take turns: in a round each one with requests does one step, so a round
takes

    sum over models with requests of: step + sequence · its requests + token · prompt tokens in it

and each request samples one token a round; its prompt is computed in its first one. What a host
does on a device (parks and wakes) it does one after the other; a parked model first ends what it
runs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from services.scheduler.residency.view import Action, Device, ModelId, Park, Resident

PARK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The times of a device for one model of the fleet. `max_sequences` holds for each model."""

    name: str
    step_s: float
    sequence_s: float
    token_s: float  # seconds of a prompt's token
    max_sequences: int
    wake_s: float
    start_s: float


@dataclass(eq=False, slots=True)
class Job:
    model: int
    num_prompt_tokens: int
    num_output_tokens: int
    arrived_at: float
    first_token_at: float = inf


@dataclass(eq=False, slots=True)
class _Hosted:
    resident: Resident
    hot_since: float = inf


@dataclass(eq=False, slots=True)
class Site:
    """One device. Times of its next events: `next_round_at`, `host_ready_at`."""

    host_id: str
    budget_bytes: int
    speed: Speed
    on_end: Callable[[Job, float], None]
    hosted: dict[ModelId, _Hosted] = field(default_factory=dict)
    used_bytes: int = 0
    num_wakes: int = 0
    wake_s_spent: float = 0.0
    _rounds: float = 0.0  # done so far; the clock of `_jobs`
    _round_s: float = inf
    _counted_at: float = 0.0
    _jobs: list[tuple[float, int, Job | None, ModelId]] = field(default_factory=list)
    _number: int = 0
    _num_prefill_tokens: int = 0
    _orders: deque[Action] = field(default_factory=deque)
    _done_at: float = inf
    _last_used: dict[ModelId, float] = field(default_factory=dict)

    # ── computing ────────────────────────────────────────────────────────────────────────────────

    @property
    def next_at(self) -> float:
        if not self._jobs:
            return self._done_at
        end_at = self._counted_at + max(0.0, self._jobs[0][0] - self._rounds) * self._round_s
        return min(self._done_at, end_at)

    def has_room(self, model: ModelId) -> bool:
        hosted = self.hosted.get(model)
        if hosted is None or hosted.resident.state != "hot":
            return False
        return hosted.resident.num_running < self.speed.max_sequences

    def add(self, job: Job, model: ModelId, now: float) -> None:
        self._advance(now)
        self._last_used[model] = now
        self._count(model, +1)
        self._num_prefill_tokens += job.num_prompt_tokens
        self._push(self._rounds + 1.0, job, model)
        self._set_pace()

    def advance_to(self, now: float) -> None:
        """Processes what is due."""
        self._advance(now)
        while self._jobs and self._jobs[0][0] <= self._rounds + 1e-9:
            at, _, job, model = heapq.heappop(self._jobs)
            assert job is not None
            if job.first_token_at == inf:
                job.first_token_at = now
                self._num_prefill_tokens -= job.num_prompt_tokens
                self._push(at + job.num_output_tokens - 1, job, model)
            else:
                self._count(model, -1)
                self.on_end(job, now)
        self._set_pace()
        if now >= self._done_at:
            self._finish_order(now)
        self._continue_orders(now)

    def _push(self, at: float, job: Job, model: ModelId) -> None:
        self._number += 1
        heapq.heappush(self._jobs, (at, self._number, job, model))

    def _advance(self, now: float) -> None:
        if self._jobs:
            self._rounds += (now - self._counted_at) / self._round_s
        self._counted_at = now

    def _set_pace(self) -> None:
        running = [each.resident.num_running for each in self.hosted.values()]
        speed, num_busy = self.speed, sum(each > 0 for each in running)
        prefill_s = speed.token_s * self._num_prefill_tokens
        self._round_s = num_busy * speed.step_s + sum(running) * speed.sequence_s + prefill_s

    def _count(self, model: ModelId, sign: int) -> None:
        hosted = self.hosted[model]
        hosted.resident = replace(hosted.resident, num_running=hosted.resident.num_running + sign)

    # ── parking and waking ───────────────────────────────────────────────────────────────────────

    def order(self, actions: list[Action], now: float) -> None:
        self._orders += actions
        for action in actions:  # no request is placed from now on
            ready_at = now + self.speed.start_s  # about
            self._set((action.model, action.revision), is_under_way=True, ready_at=ready_at)
        self._continue_orders(now)

    def view(self, now: float) -> Device:
        models = {}
        for model, each in self.hosted.items():
            is_hot = each.resident.state == "hot"
            hot_s = now - each.hot_since
            models[model] = replace(each.resident, hot_s=hot_s) if is_hot else each.resident
        return Device(
            host_id=self.host_id,
            name="0",
            budget_bytes=self.budget_bytes,
            used_bytes=self.used_bytes,
            models=models,
            is_waking=bool(self._orders),
        )

    def _continue_orders(self, now: float) -> None:
        if not self._orders or self._done_at < inf:
            return
        action = self._orders[0]
        model = action.model, action.revision
        resident = self.hosted[model].resident
        if isinstance(action, Park):
            if resident.state == "hot":
                self._set(model, state="parking")
            if resident.num_running == 0:
                self._done_at = now + PARK_S
            return
        self._stop_standbys(resident)
        duration_s = self.speed.start_s if resident.is_cold else self.speed.wake_s
        self.num_wakes += 1
        self.wake_s_spent += duration_s
        self.used_bytes += resident.weights_bytes * resident.is_cold + resident.kv_floor_bytes
        if self.used_bytes > self.budget_bytes:
            raise RuntimeError(f"{self.host_id} exceeds its budget")
        self._set(model, state="waking")
        self._done_at = now + duration_s

    def _finish_order(self, now: float) -> None:
        action, self._done_at = self._orders.popleft(), inf
        model = action.model, action.revision
        if isinstance(action, Park):
            self._set(model, state="standby", is_under_way=False)
            self.used_bytes -= self.hosted[model].resident.kv_floor_bytes
        else:
            self._set(model, state="hot", is_under_way=False)
            self.hosted[model].hot_since = now

    def _stop_standbys(self, target: Resident) -> None:
        """Stops models in standby for a cold start, least recently used first, as a host does."""
        if not target.is_cold:
            return
        needed = self.used_bytes + target.weights_bytes + target.kv_floor_bytes - self.budget_bytes
        standbys = [
            model for model, each in self.hosted.items() if each.resident.state == "standby"
        ]
        for model in sorted(standbys, key=lambda each: self._last_used.get(each, -inf)):
            if needed <= 0:
                return
            needed -= self.hosted[model].resident.weights_bytes
            self.used_bytes -= self.hosted[model].resident.weights_bytes
            self._set(model, state="cold")

    def _set(self, model: ModelId, **changes: object) -> None:
        hosted = self.hosted[model]
        hosted.resident = replace(hosted.resident, **changes)  # type: ignore[arg-type]

    def host(self, resident: Resident) -> None:
        """Adds a model in its state."""
        self.hosted[resident.model] = _Hosted(resident)
        if resident.state != "cold":
            self.used_bytes += resident.weights_bytes
        if resident.state == "hot":
            self.used_bytes += resident.kv_floor_bytes
            self.hosted[resident.model].hot_since = 0.0
