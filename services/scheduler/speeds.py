"""How fast the workers are, learned from the counters in their heartbeats.

A worker's step takes about

    step_s + token_s · prompt tokens + drawn_s · generated tokens

The three are fitted by least squares to the differences between heartbeats, older ones forgotten,
and drawn towards the mean of the model's other workers, so that a new one is believed to be like
them until it shows otherwise. What a handoff costs beyond computing is learned in the same way:
seconds until a prefill worker has answered, and seconds that a pushed token keeps its link busy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shared.messages import WorkerLoad

KEEP = 0.97  # of what was seen before, with each heartbeat that tells of work
MIN_BUSY_S = 0.01  # less is told by later heartbeats, too
MIN_MEASURED_TOKENS = 256.0
POOL_SHARE = 0.05  # how much one fit moves the mean
# The prior weighs like so many steps, prompt tokens and drawn tokens, each seen alone.
PRIOR_WEIGHT = np.array([4.0, 128.0, 8.0])
MIN_TOKEN_S, MAX_S = 1e-9, 60.0
DRAWN_S = 1e-4


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds per step, per computed prompt token, and of link time per pushed token."""

    step_s: float = 0.005
    token_s: float = 1e-4
    push_token_s: float = 5e-6
    is_measured: bool = False  # by the worker's own work, not only its like


class RunningRatio:
    """Seconds per unit, older ones forgotten; worth `weight` units of its first value."""

    def __init__(self, ratio: float, weight: float) -> None:
        self._seconds, self._units = ratio * weight, weight
        self._floor = weight

    @property
    def value(self) -> float:
        return self._seconds / self._units

    def add(self, seconds: float, units: float) -> None:
        keep = KEEP if self._units > self._floor else 1.0
        self._seconds = self._seconds * keep + seconds
        self._units = self._units * keep + units


class WorkerSpeed:
    """One worker's, from its successive loads. A counter that falls begins a new history."""

    def __init__(self, prior: Speed) -> None:
        self.speed = replace(prior, is_measured=False)
        self._prior = np.array([prior.step_s, prior.token_s, DRAWN_S])
        self._moments = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._num_tokens = 0.0
        self._push = RunningRatio(prior.push_token_s, 1024.0)
        self._last: WorkerLoad | None = None
        self._last_pushed: WorkerLoad | None = None

    def observe(self, load: WorkerLoad) -> bool:
        """Whether `speed` may have changed."""
        last = self._last
        if last is None or load.busy_s < last.busy_s:
            self._last = self._last_pushed = load
            return False
        changed = self._observe_push(load)
        if load.busy_s - last.busy_s < MIN_BUSY_S:
            return changed
        self._last = load
        self._count(
            load.busy_s - last.busy_s,
            load.num_busy_steps - last.num_busy_steps,
            load.num_computed_prompt_tokens - last.num_computed_prompt_tokens,
            load.num_generated_tokens - last.num_generated_tokens,
        )
        self._fit()
        return True

    def _count(self, busy_s: float, num_steps: int, num_prompt: int, num_drawn: int) -> None:
        units = np.array([num_steps, num_prompt, num_drawn], dtype=np.float64).clip(0)
        self._moments = self._moments * KEEP + np.outer(units, units)
        self._products = self._products * KEEP + units * busy_s
        self._num_tokens += units[1]

    def _fit(self) -> None:
        weight = PRIOR_WEIGHT**2
        moments = self._moments + np.diag(weight)
        step_s, token_s, _ = np.linalg.solve(moments, self._products + weight * self._prior)
        self.speed = Speed(
            step_s=float(min(max(step_s, 0.0), MAX_S)),
            token_s=float(min(max(token_s, MIN_TOKEN_S), MAX_S)),
            push_token_s=self.speed.push_token_s,
            is_measured=self._num_tokens >= MIN_MEASURED_TOKENS,
        )

    def _observe_push(self, load: WorkerLoad) -> bool:
        last = self._last_pushed
        assert last is not None
        num_tokens, seconds = load.num_pushed_tokens - last.num_pushed_tokens, load.push_s
        self._last_pushed = load
        if num_tokens <= 0 or seconds < last.push_s:
            return False
        self._push.add(seconds - last.push_s, num_tokens)
        self.speed = replace(self.speed, push_token_s=min(self._push.value, MAX_S))
        return True


class ModelSpeeds:
    """Those of all workers of one model, and what a handoff between two costs besides."""

    def __init__(self) -> None:
        self.mean = Speed()
        self._workers: dict[str, WorkerSpeed] = {}
        self._handoffs: dict[str, tuple[int, float]] = {}  # last counters of a decode worker
        self._ack = RunningRatio(0.002, 4.0)

    @property
    def hop_s(self) -> float:
        """Asking and answering, and about as much again for the last frame and its receipt."""
        return 2 * self._ack.value

    def observe(self, worker_id: str, load: WorkerLoad) -> Speed:
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = WorkerSpeed(self.mean)
        if worker.observe(load) and worker.speed.is_measured:
            self.mean = _mixed(self.mean, worker.speed)
        self._observe_handoffs(worker_id, load)
        return worker.speed

    def forget(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)
        self._handoffs.pop(worker_id, None)

    def _observe_handoffs(self, worker_id: str, load: WorkerLoad) -> None:
        num_before, seconds_before = self._handoffs.get(
            worker_id, (load.num_handoffs, load.handoff_ack_s)
        )
        self._handoffs[worker_id] = load.num_handoffs, load.handoff_ack_s
        num_new, seconds = load.num_handoffs - num_before, load.handoff_ack_s - seconds_before
        if num_new > 0 and seconds >= 0:
            self._ack.add(seconds, num_new)


def _mixed(mean: Speed, one: Speed) -> Speed:
    share = POOL_SHARE if mean.is_measured else 1.0
    return Speed(
        step_s=mean.step_s + share * (one.step_s - mean.step_s),
        token_s=mean.token_s + share * (one.token_s - mean.token_s),
        push_token_s=mean.push_token_s + share * (one.push_token_s - mean.push_token_s),
        is_measured=True,
    )
