"""The advice of several schedulers, added up."""

from __future__ import annotations

from shared.messages import Heartbeat, RoleDemand, SchedulerLoad
from shared.metrics.role_demands import MAX_MODELS, total_demands


def scheduler(number: int, *demands: RoleDemand) -> Heartbeat:
    return Heartbeat(
        process_id=f"scheduler-{number}",
        epoch=1,
        sequence_number=1,
        roles=("scheduler",),
        state="ready",
        interval_s=0.25,
        scheduler=SchedulerLoad(demands=demands),
    )


def demand(model: str, num_wanted: int, num_queued: int) -> RoleDemand:
    return RoleDemand(
        model=model,
        role="prefill",
        num_queued_requests=num_queued,
        num_queued_tokens=100 * num_queued,
        work_s=0.5 * num_queued,
        num_workers=2,
        num_wanted_workers=num_wanted,
    )


def test_queues_are_added_and_workers_are_not() -> None:
    beats = [scheduler(1, demand("a", 3, 4)), scheduler(2, demand("b", 1, 0), demand("a", 5, 1))]
    assert total_demands(beats) == [demand("a", 5, 5), demand("b", 1, 0)]


def test_number_of_models_is_bounded() -> None:
    many = [demand(f"m{number:03}", 1, 0) for number in range(MAX_MODELS + 10)]
    found = total_demands([scheduler(1, *many[:40]), scheduler(2, *many[40:])])
    assert [each.model for each in found] == [each.model for each in many[:MAX_MODELS]]
