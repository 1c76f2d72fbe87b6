"""Learns the speed of workers from the counters in their heartbeats.

A worker's step takes about

    step_s + token_s · prompt tokens + sampling_s · generated tokens

The three are fitted to the differences between heartbeats by least squares with exponential
forgetting. None of them can be negative: where one would be, the others are fitted without it. The
mean of the model's other workers is the prior of a new one. A process that was frozen in a step
reports seconds of no work; as a worker that seems slow gets no requests that would correct it, one
observation counts at most MAX_OVER_EXPECTED times what was expected.

The cost of a handoff beyond computing is learned in the same way: seconds until a prefill worker
accepts, and link seconds per pushed token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from shared.messages import WorkerLoad

DECAY = 0.97  # factor of earlier observations, per heartbeat that reports work
MIN_BUSY_S = 0.01  # smaller differences are added to those of later heartbeats
MIN_MEASURED_TOKENS = 256.0
MAX_OVER_EXPECTED = 4.0  # a worker that is slower by more is learned in several observations
MIN_LIMIT_S = 0.05  # lower bound of the seconds of an observation: an estimate of 0 can grow
POOL_SHARE = 0.05  # how much one fit moves the mean
# The prior weighs as much as so many steps, prompt tokens and sampled tokens, measured alone.
PRIOR_WEIGHTS = (1.0, 128.0, 8.0)
MAX_STEP_COUNT = 10_000_000  # steps or tokens between two heartbeats
MIN_TOKEN_S, MAX_S = 1e-9, 60.0
MAX_ACK_S = 1.0  # decode waits no longer for a prefill worker's reply
SAMPLED_S = 1e-4

Triple = tuple[float, float, float]
Sextuple = tuple[float, float, float, float, float, float]
Held = tuple[bool, bool, bool]  # whether each coefficient is held at zero
_NONE_HELD: Held = (False, False, False)
_SOME_HELD: list[Held] = list(itertools.product((False, True), (False, True), (False, True)))[1:]


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds per step, per computed prompt token, and of link time per pushed token."""

    step_s: float = 0.005
    token_s: float = 1e-4
    push_token_s: float = 5e-6
    is_measured: bool = False  # work of this worker has been measured, not only that of its peers


class RunningRatio:
    """Seconds per unit with exponential forgetting; starts as `weight` units of the first value."""

    def __init__(self, ratio: float, weight: float) -> None:
        self._seconds, self._units = ratio * weight, weight
        self._floor = weight

    @property
    def value(self) -> float:
        return self._seconds / self._units

    def add(self, seconds: float, units: float) -> None:
        decay = DECAY if self._units > self._floor else 1.0
        self._seconds = self._seconds * decay + seconds
        self._units = self._units * decay + units


class LeastSquares:
    """Fits seconds ≈ x·a + y·b + z·c with a, b, c >= 0, older equations forgotten.

    `weights` say how strongly the prior holds. Plain floats: at this size a library call costs more
    than the arithmetic.
    """

    def __init__(self, prior: Triple, weights: Triple) -> None:
        self._base = tuple(each * each for each in weights)
        self._base_products = tuple(b * p for b, p in zip(self._base, prior, strict=True))
        self._moments = [0.0] * 6  # xx, xy, xz, yy, yz, zz
        self._products = [0.0] * 3

    def add(self, seconds: float, x: float, y: float, z: float) -> None:
        new = (x * x, x * y, x * z, y * y, y * z, z * z)
        self._moments = [DECAY * old + each for old, each in zip(self._moments, new, strict=True)]
        products = (x * seconds, y * seconds, z * seconds)
        self._products = [
            DECAY * old + each for old, each in zip(self._products, products, strict=True)
        ]

    def solution(self) -> Triple:
        """Returns (a, b, c): the unconstrained minimum if no coefficient is negative; otherwise the
        best of the minima with some coefficients held at zero, one of which is the constrained
        minimum (Lawson & Hanson, Solving Least Squares Problems, 1974, chapter 23).
        """
        free = self._minimum(_NONE_HELD)
        if min(free) >= 0.0:
            return free
        candidates = (self._minimum(held) for held in _SOME_HELD)
        return min((each for each in candidates if min(each) >= 0.0), key=self._loss)

    def _loss(self, coefficients: Triple) -> float:
        """Returns half the sum of squared errors, less a constant."""
        a, b, c = coefficients
        (xx, xy, xz, yy, yz, zz), (p, q, r) = self._normal_equations()
        squares = xx * a * a + yy * b * b + zz * c * c
        return squares / 2 + xy * a * b + xz * a * c + yz * b * c - p * a - q * b - r * c

    def _normal_equations(self) -> tuple[Sextuple, Triple]:
        """Returns the moments xx, xy, xz, yy, yz, zz and products with seconds, of the
        equations and prior.
        """
        xx, xy, xz, yy, yz, zz = self._moments
        first, second, third = self._base
        p, q, r = (
            old + base for old, base in zip(self._products, self._base_products, strict=True)
        )
        return (xx + first, xy, xz, yy + second, yz, zz + third), (p, q, r)

    def _minimum(self, is_held: Held) -> Triple:
        """Solves the equations with some coefficients held at zero, by elimination; the prior keeps
        pivots positive.
        """
        (xx, xy, xz, yy, yz, zz), (p, q, r) = self._normal_equations()
        if is_held[0]:
            xy = xz = p = 0.0
        if is_held[1]:
            xy = yz = q = 0.0
        if is_held[2]:
            xz = yz = r = 0.0
        up, right = xy / xx, xz / xx
        yy, yz, q = yy - up * xy, yz - up * xz, q - up * p
        zz, r = zz - right * xz, r - right * p
        across = yz / yy
        c = (r - across * q) / (zz - across * yz)
        b = (q - yz * c) / yy
        return (p - xy * b - xz * c) / xx, b, c


class WorkerThroughput:
    """The speed of one worker, from successive loads. Ignores counters that fall or jump."""

    def __init__(self, prior: Speed) -> None:
        self.speed = replace(prior, is_measured=False)
        self._solution = (prior.step_s, prior.token_s, SAMPLED_S)
        self._fit = LeastSquares(self._solution, PRIOR_WEIGHTS)
        self._num_tokens = 0.0
        self._push = RunningRatio(prior.push_token_s, 1024.0)
        self._last: WorkerLoad | None = None
        self._last_pushed: WorkerLoad | None = None

    def observe(self, load: WorkerLoad) -> bool:
        """Returns whether `speed` may have changed."""
        last = self._last
        if last is None or not _is_plausible(last, load):
            self._last = self._last_pushed = load
            return False
        changed = self._observe_push(load)
        if load.busy_s - last.busy_s < MIN_BUSY_S:
            return changed
        self._last = load
        num_tokens = load.num_computed_prompt_tokens - last.num_computed_prompt_tokens
        self._num_tokens += num_tokens
        work = (
            load.num_busy_steps - last.num_busy_steps,
            num_tokens,
            load.num_generated_tokens - last.num_generated_tokens,
        )
        expected_s = sum(a * x for a, x in zip(self._solution, work, strict=True))
        limit_s = max(MAX_OVER_EXPECTED * expected_s, MIN_LIMIT_S)
        self._fit.add(min(load.busy_s - last.busy_s, limit_s), *work)
        self._solution = step_s, token_s, _ = self._fit.solution()
        self.speed = Speed(
            step_s=min(step_s, MAX_S),
            token_s=min(max(token_s, MIN_TOKEN_S), MAX_S),
            push_token_s=self.speed.push_token_s,
            is_measured=self._num_tokens >= MIN_MEASURED_TOKENS,
        )
        return True

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


class ModelThroughput:
    """The speeds of all workers of one model, and the overhead of a handoff between two."""

    def __init__(self) -> None:
        self.mean = Speed()
        self._workers: dict[str, WorkerThroughput] = {}
        self._handoffs: dict[str, tuple[int, float]] = {}  # last counters of a decode worker
        self._ack = RunningRatio(0.002, 4.0)

    @property
    def handoff_overhead_s(self) -> float:
        """Twice the time of a request: the last frame and its receipt take about as long."""
        return 2 * self._ack.value

    def observe(self, worker_id: str, load: WorkerLoad, *, is_prior: bool = True) -> Speed:
        """Returns the speed of a worker, which becomes part of the mean if `is_prior`."""
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = WorkerThroughput(self.mean)
        if worker.observe(load) and worker.speed.is_measured and is_prior:
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
            self._ack.add(min(seconds, num_new * MAX_ACK_S), num_new)


def _is_plausible(last: WorkerLoad, load: WorkerLoad) -> bool:
    """Whether one heartbeat may follow the other within one life of a worker."""
    differences = (
        load.num_busy_steps - last.num_busy_steps,
        load.num_computed_prompt_tokens - last.num_computed_prompt_tokens,
        load.num_generated_tokens - last.num_generated_tokens,
    )
    is_same = last.num_engines == load.num_engines  # the mean of others may be any
    is_consistent = is_same and all(0 <= each <= MAX_STEP_COUNT for each in differences)
    return is_consistent and 0 <= load.busy_s - last.busy_s <= MAX_S


def _mixed(mean: Speed, one: Speed) -> Speed:
    share = POOL_SHARE if mean.is_measured else 1.0
    return Speed(
        step_s=mean.step_s + share * (one.step_s - mean.step_s),
        token_s=mean.token_s + share * (one.token_s - mean.token_s),
        push_token_s=mean.push_token_s + share * (one.push_token_s - mean.push_token_s),
        is_measured=True,
    )
