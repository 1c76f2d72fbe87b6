from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.throughput import (
    PRIOR_WEIGHTS,
    LeastSquares,
    ModelThroughput,
    Speed,
    WorkerThroughput,
)
from shared.messages import WorkerLoad


def load(**counts: float) -> WorkerLoad:
    return WorkerLoad(step=1, step_budget_s=1.0, **counts)  # type: ignore[arg-type]


def loads_of(
    step_s: float, token_s: float, *, sampled_s: float = 0.0, num: int = 60
) -> Iterator[WorkerLoad]:
    """Loads of a worker that computes 1 to 11 prompts of random length between two heartbeats."""
    rng, steps, prompt, sampled, busy_s = Random(0), 0, 0, 0, 0.0
    for _ in range(num):
        yield load(
            num_busy_steps=steps,
            num_computed_prompt_tokens=prompt,
            num_generated_tokens=sampled,
            busy_s=busy_s,
        )
        new_steps, new_sampled = rng.randrange(1, 12), rng.randrange(100)
        new_prompt = sum(rng.randrange(1, 2000) for _ in range(new_steps))
        steps, prompt, sampled = steps + new_steps, prompt + new_prompt, sampled + new_sampled
        busy_s += new_steps * step_s + new_prompt * token_s + new_sampled * sampled_s


@pytest.mark.parametrize(("step_s", "token_s"), [(0.005, 1e-4), (0.02, 5e-4), (0.001, 2e-6)])
def test_step_and_token_times_are_separated(step_s: float, token_s: float) -> None:
    worker = WorkerThroughput(Speed())
    for each in loads_of(step_s, token_s, sampled_s=2e-5):
        worker.observe(each)
    assert worker.speed.is_measured
    assert worker.speed.token_s == pytest.approx(token_s, rel=0.1, abs=2e-6)
    assert worker.speed.step_s == pytest.approx(step_s, rel=0.15, abs=0.001)


def test_slowdown_shows_within_40_heartbeats() -> None:
    worker = WorkerThroughput(Speed())
    *_, last = [each for each in loads_of(0.005, 1e-4) if not worker.observe(each) or each]
    before = worker.speed.token_s
    for each in loads_of(0.005, 1e-3, num=40):
        worker.observe(
            load(
                num_busy_steps=last.num_busy_steps + each.num_busy_steps,
                num_computed_prompt_tokens=(
                    last.num_computed_prompt_tokens + each.num_computed_prompt_tokens
                ),
                busy_s=last.busy_s + each.busy_s,
            )
        )
    assert worker.speed.token_s > 5 * before


@pytest.mark.parametrize(("num_prompt", "num_sampled"), [(0, 16), (200, 16), (200, 0)])
def test_frozen_step_does_not_keep_requests_away(num_prompt: int, num_sampled: int) -> None:
    """The step of a worker that is new here after its loss, as it was frozen for 5 s."""
    worker = WorkerThroughput(Speed(step_s=0.015, token_s=1e-4, is_measured=True))
    worker.observe(load())
    worker.observe(
        load(
            num_busy_steps=1,
            num_computed_prompt_tokens=num_prompt,
            num_generated_tokens=num_sampled,
            busy_s=5.0,
        )
    )
    assert worker.speed.step_s < 4 * 0.015
    assert worker.speed.token_s < 4 * 1e-4


def test_much_slower_worker_is_learned() -> None:
    worker = WorkerThroughput(Speed(step_s=0.005, token_s=1e-4))
    for each in loads_of(0.5, 1e-2, num=40):
        worker.observe(each)
    assert worker.speed.token_s == pytest.approx(1e-2, rel=0.5)


def test_speed_is_not_measured_without_prompts() -> None:
    worker = WorkerThroughput(Speed())
    for number in range(50):
        worker.observe(load(num_busy_steps=number, num_generated_tokens=number, busy_s=number / 9))
    assert not worker.speed.is_measured


def test_falling_counters_do_not_change_the_speed() -> None:
    worker = WorkerThroughput(Speed())
    for each in loads_of(0.005, 1e-4):
        worker.observe(each)
    known = worker.speed
    assert not worker.observe(load())
    assert worker.speed == known


def test_new_worker_starts_with_the_mean_speed() -> None:
    speeds = ModelThroughput()
    for each in loads_of(0.02, 5e-4):
        speeds.observe("old", each)
    speed = speeds.observe("new", load())
    assert speed.token_s == pytest.approx(5e-4, rel=0.2)
    assert not speed.is_measured


def test_handoff_overhead_and_push_speed_are_learned() -> None:
    speeds = ModelThroughput()
    assert speeds.handoff_overhead_s == pytest.approx(0.004)
    for number in range(200):
        speeds.observe("decode", load(num_handoffs=2 * number, handoff_ack_s=2 * number * 0.03))
        pushed = 1000 * number
        speed = speeds.observe("prefill", load(num_pushed_tokens=pushed, push_s=pushed * 2e-5))
    assert speeds.handoff_overhead_s == pytest.approx(0.06, rel=0.1)
    assert speed.push_token_s == pytest.approx(2e-5, rel=0.1)


counts = st.integers(0, 2**53)
seconds = st.floats(0, 1e12)


@given(
    st.lists(
        st.builds(
            WorkerLoad,
            step=counts,
            step_budget_s=st.just(1.0),
            num_busy_steps=counts,
            busy_s=seconds,
            num_computed_prompt_tokens=counts,
            num_generated_tokens=counts,
            num_handoffs=counts,
            handoff_ack_s=seconds,
            num_pushed_tokens=counts,
            push_s=seconds,
        ),
        max_size=8,
    )
)
def test_speeds_are_within_bounds_for_any_heartbeat(loads: list[WorkerLoad]) -> None:
    speeds = ModelThroughput()
    for each in loads:
        speed = speeds.observe("w", each)
        assert 0 <= speed.step_s <= 60 and 0 < speed.token_s <= 60
        assert 0 <= speed.push_token_s <= 60
        assert 0 <= speeds.handoff_overhead_s <= 2


triples = st.tuples(*[st.floats(0, 1000) for _ in range(4)])


@given(st.lists(triples, max_size=10))
def test_least_squares_finds_the_nonnegative_optimum(
    equations: list[tuple[float, ...]],
) -> None:
    """Checks the Karush-Kuhn-Tucker conditions, and numpy's solution if it is not negative."""
    prior = (0.005, 1e-4, 1e-4)
    fit = LeastSquares(prior, PRIOR_WEIGHTS)
    moments, products = np.zeros((3, 3)), np.zeros(3)
    for y, *xs in equations:
        fit.add(y, *xs)
        moments, products = 0.97 * moments + np.outer(xs, xs), 0.97 * products + np.array(xs) * y
    base = np.array(PRIOR_WEIGHTS) ** 2
    matrix, vector = moments + np.diag(base), products + base * prior
    found = np.array(fit.solution())
    free = np.linalg.solve(matrix, vector)
    if (free >= 0).all():
        assert found == pytest.approx(free, rel=1e-6, abs=1e-9)
    gradient = matrix @ found - vector
    scale = 1e-8 * (np.abs(matrix) @ np.abs(found) + np.abs(vector) + 1)
    assert (found >= 0).all()
    assert (gradient >= -scale).all()
    assert (np.abs(gradient[found > 0]) <= scale[found > 0]).all()


def test_other_coefficients_are_refitted_if_one_is_zero() -> None:
    """If the first were only clamped to zero, the other two would be wrong."""
    fit = LeastSquares((0.0, 0.0, 0.0), (1e-6, 1e-6, 1e-6))
    for x, y in ((1.0, 10.0), (2.0, 11.0), (8.0, 12.0)):  # 0.1 y exactly, and less with more x
        fit.add(0.1 * y - 0.01 * x, x, y, 0.0)
    a, b, c = fit.solution()
    assert (a, c) == (0.0, 0.0)
    assert 0.09 < b < 0.1
