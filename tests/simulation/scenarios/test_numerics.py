"""Fleets whose workers compute different bits, as on unlike devices.

The checks compare each answer with the bits of the workers that continued it, and cached KV with
the bits of the worker that holds it.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from shared.numerics import Numerics
from tests.simulation.plan import Fault, Plan
from tests.simulation.scenarios.fleets import plan_with
from tests.simulation.simulation import run_plan

LOST = Fault(at_s=0.3, kind="kill", target="decode-0", comes_back=False)


def plan_of_unlike(*faults: Fault, unlike: tuple[str, ...], **fleet: int) -> Plan:
    """Prompts of several blocks, and outputs long enough for a fault to interrupt some of them."""
    plan = plan_with(*faults, num_requests=16, **fleet)
    requests = tuple(
        replace(
            each,
            prompt=tuple(range(100 + 50 * n, 150 + 50 * n)),
            sampling=msgspec.structs.replace(each.sampling, max_tokens=60),
        )
        for n, each in enumerate(plan.requests)
    )
    return replace(plan, fleet=replace(plan.fleet, unlike=unlike), requests=requests)


def test_interrupted_answers_stay_on_equal_numerics() -> None:
    outcome = run_plan(plan_of_unlike(LOST, num_decode=3, unlike=("decode-2",)))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 16}
    assert outcome.reports["ReportResubmission"] > 0
    assert outcome.reports["ReportNumericsChange"] == 0


def test_interrupted_answers_without_equal_numerics_go_on_and_are_counted() -> None:
    outcome = run_plan(plan_of_unlike(LOST, num_decode=2, unlike=("decode-1",)))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 16}
    assert outcome.reports["ReportNumericsChange"] > 0


def test_prompts_are_computed_by_decode_if_all_prefill_workers_are_unlike() -> None:
    outcome = run_plan(plan_of_unlike(num_decode=1, num_prefill=1, unlike=("prefill-0",)))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 16}
    assert outcome.num_pushed_tokens == 0
    assert outcome.events["prefill_attempt_failed"] == 0, "none was tried"
    assert outcome.reports["ReportUnlikePrefill"] == 16


def test_each_half_of_a_mixed_fleet_pushes_to_its_own_kind() -> None:
    plan = plan_of_unlike(num_decode=2, num_prefill=2, unlike=("prefill-1", "decode-1"))
    outcome = run_plan(plan)
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 16}
    assert outcome.num_pushed_tokens > 0
    assert outcome.reports["ReportUnlikePrefill"] == 0


def test_oracle_finds_shared_kv_of_unlike_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: every worker may use any KV."""
    monkeypatch.setattr(Numerics, "kv_key", "any")
    outcome = run_plan(plan_of_unlike(num_decode=1, num_prefill=1, unlike=("prefill-0",)))
    assert any("wrong KV" in each for each in outcome.wrongs)


def test_oracle_finds_unreported_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: all numerics count as one, so that nobody prefers or counts them."""
    monkeypatch.setattr(Numerics, "__eq__", lambda self, other: isinstance(other, Numerics))
    outcome = run_plan(plan_of_unlike(LOST, num_decode=2, unlike=("decode-1",)))
    assert any("0 reported" in each for each in outcome.wrongs)
