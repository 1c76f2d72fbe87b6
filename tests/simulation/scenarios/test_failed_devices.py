"""Fleets with devices that fail, and prompts that break steps."""

from __future__ import annotations

import pytest

from services.gateway.streams.streams import Streams
from shared.errors import HearthError
from tests.simulation.plan import Fault
from tests.simulation.scenarios.fleets import plan_with
from tests.simulation.simulation import Outcome, run_plan


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


def test_faulty_gpu_costs_no_request() -> None:
    """Its steps would succeed: no token of them is used once its health has ended the worker."""
    for target, num_prefill in (("decode-0", 0), ("prefill-0", 1)):
        faults = [Fault(at_s=at_s, kind="gpu_faulty", target=target) for at_s in (0.5, 1.5)]
        outcome = run_plan(plan_with(*faults, num_prefill=num_prefill))
        assert outcome.wrongs == []
        assert outcome.endings == {"finished": 60}
        assert outcome.events["device_lost"] >= 1


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
