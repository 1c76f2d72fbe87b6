"""Fleets with devices that fail, and prompts that break steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.gateway.streams.streams import Streams
from shared.engine.runners.timing_runner import FIRST_TOKEN_ID, StepCost
from shared.errors import HearthError
from shared.messages import SamplingParams
from tests.simulation.plan import PATIENT_S, POISON, Fault, FleetPlan, Plan, RequestPlan
from tests.simulation.simulation import Outcome, run_plan

FLEET = FleetPlan(
    num_gateways=1,
    num_schedulers=1,
    num_indices=1,
    num_prefill=0,
    num_decode=2,
    num_both=0,
    num_blocks=64,
    max_batch_tokens=128,
    max_sequences=32,
    cost=StepCost(base_s=0.005, per_token_s=20e-6),
    copy_s=0.0,
    max_queued_requests=100,
)


def plan_with(
    *faults: Fault, num_requests: int = 60, poisoned: tuple[int, ...] = (), **fleet: int
) -> Plan:
    """Requests in a steady stream; those of the numbers `poisoned` break steps."""
    requests = tuple(
        RequestPlan(
            request_id=f"r{n}",
            at_s=0.05 * n,
            tenant_id=f"tenant-{'ab'[n % 2]}",
            prompt=(POISON if n in poisoned else FIRST_TOKEN_ID, 100 + n, 200 + n),
            num_choices=1 + n % 2,
            sampling=SamplingParams(seed=n, max_tokens=12),
            deadline_s=PATIENT_S,
            pooling=None,
            stop_modulus=0,
            leaves_after_s=None,
        )
        for n in range(num_requests)
    )
    return Plan(seed=1, fleet=replace(FLEET, **fleet), requests=requests, faults=faults)


def sick(target: str = "decode-0", *, share: float = 1.0) -> Fault:
    return Fault(at_s=0.0, kind="runner_raises", target=target, duration_s=2.0, amount=share)


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("num_prefill", [0, 1])
def test_failing_device_costs_no_request(share: float, num_prefill: int) -> None:
    outcome = run_plan(plan_with(sick(share=share), num_prefill=num_prefill))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 60}


def test_failing_device_of_a_prefill_worker_costs_no_request() -> None:
    outcome = run_plan(plan_with(sick("prefill-0"), num_prefill=1))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 60}


def test_only_failing_worker_is_waited_for() -> None:
    outcome = run_plan(plan_with(sick(), num_requests=20, num_decode=1))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 20}


@pytest.mark.parametrize("num_decode", [1, 4])
def test_poisonous_prompt_fails_alone_on_two_workers(num_decode: int) -> None:
    """Without further requests each of its steps has one row."""
    outcome = run_plan(plan_with(poisoned=(7, 30), num_decode=num_decode))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 58, "request_breaks_workers": 2}
    assert outcome.events["peer_lost"] == 0


def test_oracle_finds_requests_that_fail_with_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: failed requests are not tried on another worker."""
    monkeypatch.setattr(Streams, "_resubmit", end_at_once)
    outcome: Outcome = run_plan(plan_with(sick(share=0.3)))
    assert outcome.endings["finished"] < 60
    assert any("nothing explains" in each for each in outcome.wrongs)


def end_at_once(self: Streams, stream: object, cause: str, now: float, **options: object) -> None:
    self._end(stream, HearthError("a step failed"), "failed", now)  # type: ignore[arg-type]
