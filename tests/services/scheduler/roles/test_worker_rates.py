"""What a worker has done lately, from its counters."""

from __future__ import annotations

import msgspec
import pytest

from services.scheduler.roles.worker_rates import WINDOW_S, WorkerRates
from services.scheduler.throughput import Speed
from shared.messages import Heartbeat, WorkerLoad
from tests.services.scheduler.test_fleet import CARD, SERVED

SPEED = Speed(step_s=0.01, token_s=1e-4, is_measured=True)


def beat(**counters: float) -> Heartbeat:
    load = WorkerLoad(step=1, step_budget_s=1.0, num_free_blocks=60, num_total_blocks=100)
    return Heartbeat(
        process_id="w1",
        epoch=1,
        sequence_number=1,
        roles=("decode",),
        state="ready",
        interval_s=0.25,
        model=CARD,
        load=msgspec.structs.replace(load, **counters),
        possible_roles=("prefill", "decode"),
    )


def test_time_for_prompts_is_no_time_of_decode_steps() -> None:
    rates = WorkerRates(lambda worker_id: SPEED)
    rates.on_heartbeat(beat(), 1.0)
    after = beat(num_busy_steps=10, busy_s=0.5, num_computed_prompt_tokens=3000)
    rates.on_heartbeat(after, 2.0)
    (work,) = rates.workers(SERVED)
    assert work.prompt_tokens_per_s == pytest.approx(3000.0)
    assert work.step_time_s == pytest.approx((0.5 - 3000 * 1e-4) / 10)
    assert (work.num_used_blocks, work.can_change) == (40, True)


def test_window_forgets_and_a_restart_begins_anew() -> None:
    rates = WorkerRates(lambda worker_id: SPEED)
    for second in range(6):
        counters = {"num_busy_steps": 10 * second, "busy_s": 0.2 * second}
        rates.on_heartbeat(beat(**counters, num_computed_prompt_tokens=100 * second**2), second)
    (work,) = rates.workers(SERVED)
    assert work.prompt_tokens_per_s == pytest.approx((2500 - 900) / WINDOW_S)
    rates.on_heartbeat(beat(num_busy_steps=3), 6.0)
    (work,) = rates.workers(SERVED)
    assert (work.prompt_tokens_per_s, work.step_time_s) == (0.0, 0.0)
    rates.lost("w1")
    assert rates.models() == set()


def test_uncached_share_is_that_of_prompts_admitted_lately() -> None:
    rates = WorkerRates(lambda worker_id: SPEED)
    assert rates.uncached_share(SERVED) == 1.0
    rates.on_heartbeat(beat(num_prompt_tokens=1000, num_cached_prompt_tokens=1000), 1.0)
    rates.on_heartbeat(beat(num_prompt_tokens=2000, num_cached_prompt_tokens=1250), 2.0)
    assert rates.uncached_share(SERVED) == pytest.approx(0.75)
