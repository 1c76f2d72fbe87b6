"""Which worker changes its role, by the work of both, and when none does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.roles.demand import QueuedWork, WorkerWork, demand_of
from services.scheduler.roles.policy import (
    HOLD_S,
    RoleChange,
    RolePolicy,
    Split,
    split_of,
    wanted_workers,
)
from services.scheduler.throughput import Speed

SPEED = Speed(step_s=0.01, token_s=1e-4, is_measured=True)
TARGET_ITL_S = 0.05
MIN_S = 10.0
BUSY = {"prompt_tokens_per_s": 1e4}  # of a prefill worker: all its time
FULL = {"num_running": 40, "step_time_s": 0.05, "num_used_blocks": 500}
NOTHING = QueuedWork()
QUEUE = QueuedWork(num_requests=10, num_prompt_tokens=40_000, num_blocks=2500)


def worker(worker_id: str, *roles: str, **changes: object) -> WorkerWork:
    idle = WorkerWork(
        worker_id=worker_id,
        roles=roles,
        group="",
        can_change=True,
        speed=SPEED,
        prompt_tokens_per_s=0.0,
        step_time_s=0.0,
        prefill_tokens_in_flight=0,
        num_running=0,
        num_used_blocks=0,
        num_total_blocks=1000,
    )
    return replace(idle, **changes)  # type: ignore[arg-type]


def fleet(*, prefill: dict[str, object], decode: dict[str, object]) -> list[WorkerWork]:
    return [
        *(worker(f"p{n}", "prefill", **prefill) for n in range(2)),
        *(worker(f"d{n}", "decode", **decode) for n in range(2)),
    ]


def run(
    policy: RolePolicy,
    workers: list[WorkerWork],
    queued: QueuedWork = NOTHING,
    *,
    first: float = 0.0,
    seconds: float = 3.0,
) -> list[tuple[float, RoleChange]]:
    """The decisions of a policy that sees the same for some seconds."""
    demand = demand_of(workers, queued, target_itl_s=TARGET_ITL_S)
    times = [first + 0.25 * tick for tick in range(int(seconds / 0.25))]
    found = ((now, policy.decide(workers, demand, now)) for now in times)
    return [(now, replace(change, min_s=0.0)) for now, change in found if change is not None]


def policy(min_workers: int = 1) -> RolePolicy:
    return RolePolicy(min_s=MIN_S, min_workers=min_workers)


def test_demand_counts_busy_workers_and_what_waits() -> None:
    workers = fleet(prefill=BUSY, decode={})
    idle_queue = demand_of(workers, QueuedWork(), target_itl_s=TARGET_ITL_S)
    assert (idle_queue.prefill, idle_queue.decode) == pytest.approx((2.0, 0.0))
    waiting = demand_of(workers, QUEUE, target_itl_s=TARGET_ITL_S)
    assert (waiting.waits_for, waiting.queued_s) == ("prefill", pytest.approx(4.0))
    assert waiting.prefill == pytest.approx(2.0 + 4.0 / 2.0)
    cached = demand_of(workers, replace(QUEUE, uncached_share=0.25), target_itl_s=TARGET_ITL_S)
    assert cached.prefill == pytest.approx(2.0 + 1.0 / 2.0)


def test_queue_waits_for_decode_where_every_decoding_worker_is_full() -> None:
    full = demand_of(fleet(prefill={}, decode=FULL), QUEUE, target_itl_s=TARGET_ITL_S)
    assert (full.waits_for, full.prefill) == ("decode", 0.0)
    assert full.decode == pytest.approx(2.0 + 2500 / 1000)
    half = fleet(prefill={}, decode=FULL)
    half[-1] = worker("d1", "decode", num_running=1, step_time_s=0.011)
    assert demand_of(half, QUEUE, target_itl_s=TARGET_ITL_S).waits_for == "prefill"


@pytest.mark.parametrize(
    ("step_time_s", "num_used_blocks", "load"),
    [(0.03, 100, 0.5), (0.03, 900, 0.9), (0.05, 0, 1.0), (0.5, 0, 2.0), (0.0, 300, 0.3)],
)
def test_decode_load_is_the_larger_share_of_blocks_and_of_the_target(
    step_time_s: float, num_used_blocks: int, load: float
) -> None:
    one = worker(
        "d", "decode", num_running=5, step_time_s=step_time_s, num_used_blocks=num_used_blocks
    )
    assert one.decode_load(TARGET_ITL_S) == pytest.approx(load)


def test_idle_decode_worker_goes_to_prefill_once_prompts_wait_long_enough() -> None:
    workers = fleet(prefill=BUSY, decode={"num_used_blocks": 300})
    workers[-1] = worker("d1", "decode", num_used_blocks=100)
    assert run(policy(), workers, QUEUE) == [(HOLD_S, RoleChange("d1", "prefill"))]


def test_idle_prefill_worker_goes_to_decode_when_streams_have_no_room() -> None:
    workers = fleet(prefill={}, decode=FULL)
    assert run(policy(), workers, QUEUE) == [(HOLD_S, RoleChange("p0", "decode"))]


def test_nothing_changes_at_low_usage_or_without_gain() -> None:
    assert run(policy(), fleet(prefill={}, decode={"num_used_blocks": 590})) == []
    assert run(policy(), fleet(prefill=BUSY, decode=FULL)) == []  # both need all they have


def test_short_need_is_no_reason() -> None:
    one, workers = policy(), fleet(prefill=BUSY, decode={})
    assert run(one, workers, QUEUE, seconds=0.75) == []
    assert run(one, fleet(prefill={}, decode={}), first=0.75, seconds=0.25) == []
    assert run(one, workers, QUEUE, first=1.0, seconds=0.75) == []


def test_change_by_anyone_starts_the_minimum_time() -> None:
    one, before = policy(), fleet(prefill=BUSY, decode={})
    run(one, before, seconds=0.25)
    after = [worker("d0", "prefill"), *before[:2], *before[3:]]
    after += [worker("d2", "decode")]
    (first,) = run(one, after, QUEUE, first=1.0, seconds=MIN_S + 1)
    assert first[0] == 1.0 + MIN_S


@pytest.mark.parametrize(
    "change", [{"can_change": False}, {"group": "elsewhere"}, {"roles": ("prefill", "decode")}]
)
def test_worker_that_must_stay_stays(change: dict[str, object]) -> None:
    """It has one handler, is the last of its group in its role, or has both roles."""
    workers = [worker("p0", "prefill", **BUSY), worker("d0", "decode", **change)]
    workers.append(worker("d1", "decode", can_change=False))
    assert run(policy(), workers, QUEUE) == []
    workers[1] = worker("d0", "decode")
    assert run(policy(), workers, QUEUE) == [(HOLD_S, RoleChange("d0", "prefill"))]
    assert run(policy(min_workers=2), workers, QUEUE) == []


def test_fleet_in_which_none_decodes_is_corrected_at_once() -> None:
    one, workers = policy(), fleet(prefill=BUSY, decode=BUSY)
    run(one, workers, seconds=0.25)
    workers = [replace(each, roles=("prefill",)) for each in workers]
    demand = demand_of(workers, QUEUE, target_itl_s=TARGET_ITL_S)
    assert one.decide(workers, demand, 1.0) is None
    assert one.decide(workers, demand, 1.0 + HOLD_S) == RoleChange("d0", "decode", 0.0)


def test_change_carries_the_time_that_its_worker_checks() -> None:
    one, workers = policy(), fleet(prefill=BUSY, decode={})
    demand = demand_of(workers, QUEUE, target_itl_s=TARGET_ITL_S)
    one.decide(workers, demand, 0.0)
    assert one.decide(workers, demand, HOLD_S) == RoleChange("d0", "prefill", MIN_S)


def test_workers_of_both_roles_take_work_of_either() -> None:
    workers = [worker("w0", "prefill", "decode"), worker("p0", "prefill"), worker("d0", "decode")]
    assert split_of(workers) == Split(1, 1, 1)
    demand = demand_of(
        [replace(each, **BUSY) for each in workers], QueuedWork(), target_itl_s=TARGET_ITL_S
    )
    assert split_of(workers).usage(demand) == pytest.approx(3.0 / 2)


def test_wanted_workers_leave_room() -> None:
    assert [wanted_workers(busy, 1) for busy in (0.0, 0.8, 0.81, 3.2, 3.3)] == [1, 1, 2, 4, 5]
