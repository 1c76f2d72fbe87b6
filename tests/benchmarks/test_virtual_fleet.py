"""Schedulers change roles by themselves in a fleet of real services on virtual time."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.roles.virtual_fleet import Arrival, FleetOptions, run_fleet
from shared.engine.executors.timing_executor import StepCost

OPTIONS = FleetOptions(
    workers=(("prefill",), ("decode",), ("decode",)),
    cost=StepCost(base_s=0.02, per_token_s=2e-3),
    num_blocks=256,
    max_batch_tokens=256,
    role_change_min_s=1.0,
    target_itl_s=0.1,
)
# 200 tokens every 0.25 s: 1.6 busy workers of prefill
ARRIVALS = [Arrival(0.25 * number, 200, 4) for number in range(24)]


def test_waiting_prompts_turn_a_decode_worker_to_prefill_and_alter_nothing() -> None:
    fixed = run_fleet(OPTIONS, ARRIVALS)
    changing = run_fleet(replace(OPTIONS, automatic_roles="on"), ARRIVALS)
    assert [roles for _, roles in fixed.roles] == [("prefill", "decode", "decode")]
    assert [sorted(roles) for _, roles in changing.roles][1] == ["decode", "prefill", "prefill"]
    for one, other in zip(fixed.timelines, changing.timelines, strict=True):
        assert one.is_finished and other.is_finished
        assert one.token_ids == other.token_ids
    assert all("decode" in roles and "prefill" in roles for _, roles in changing.roles)
