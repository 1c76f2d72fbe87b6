"""Fleets of several releases: some workers lack what some requests need.

The checks record every worker that runs any part of a request without having what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from services.gateway.streams.stream import Stream
from services.scheduler.placement import Decision
from services.scheduler.worker_table import WorkerTable
from shared.engine.worker import EngineWorker
from tests.simulation.plan import DEMO, Fault, Plan
from tests.simulation.planted import candidates_unfiltered, needs_forgotten
from tests.simulation.scenarios.fleets import plan_with
from tests.simulation.simulation import Outcome, run_plan

NEEDING = range(0, 40, 2)  # every other request


def mixed_plan(
    *faults: Fault, capable: tuple[str, ...], changing: tuple[str, ...] = (), **fleet: int
) -> Plan:
    """Prompts of several blocks, and outputs long enough for a fault to interrupt some of them."""
    plan = plan_with(*faults, num_requests=40, **fleet)
    requests = tuple(
        replace(
            each,
            prompt=tuple(range(100 + 50 * n, 150 + 50 * n)),
            sampling=msgspec.structs.replace(each.sampling, max_tokens=60),
            needs=DEMO if n in NEEDING else (),
        )
        for n, each in enumerate(plan.requests)
    )
    mixed = replace(plan.fleet, capable=capable, changing=changing)
    return replace(plan, fleet=mixed, requests=requests)


def restart(worker_id: str, at_s: float, kind: str = "drain") -> Fault:
    return Fault(at_s=at_s, kind=kind, target=worker_id, duration_s=0.3)  # type: ignore[arg-type]


def lose(worker_id: str, at_s: float) -> Fault:
    return Fault(at_s=at_s, kind="kill", target=worker_id, comes_back=False)


def test_only_capable_workers_run_what_needs_them() -> None:
    plan = mixed_plan(capable=("decode-1", "prefill-1"), num_decode=3, num_prefill=2)
    outcome = run_plan(plan)
    assert (outcome.wrongs, outcome.endings) == ([], {"finished": 40})
    assert outcome.num_pushed_tokens > 0
    assert outcome.events["prefill_attempt_failed"] == 0, "no other prefill worker was tried"


def test_interrupted_answers_go_on_where_they_can() -> None:
    capable = ("decode-1", "decode-2")
    outcome = run_plan(mixed_plan(lose("decode-1", 1.0), capable=capable, num_decode=4))
    assert (outcome.wrongs, outcome.endings) == ([], {"finished": 40})
    assert outcome.reports["ReportResubmission"] > 0


@pytest.mark.parametrize("kind", ["drain", "kill"])
def test_rolling_upgrade_and_its_reversal_lose_no_request(kind: str) -> None:
    """Each worker in turn; a first capable one is there from the start, a last one to the end."""
    ids = ("decode-1", "prefill-0", "decode-2")
    forth = [restart(each, 0.2 + 0.6 * n, kind) for n, each in enumerate(ids)]
    back = [restart(each, 2.0 + 0.6 * n, kind) for n, each in enumerate(ids)]
    plan = mixed_plan(
        *forth, *back, capable=("decode-0",), changing=ids, num_decode=3, num_prefill=1
    )
    late = tuple(replace(each, at_s=2 * each.at_s) for each in plan.requests)
    outcome = run_plan(replace(plan, requests=late))
    assert (outcome.wrongs, outcome.endings) == ([], {"finished": 40})
    assert outcome.events["name_in_use"] == 0


def test_requests_fail_while_no_capable_worker_lives() -> None:
    """Its last tries of interrupted ones last longer than the time until it returns."""
    away = Fault(at_s=0.5, kind="kill", target="decode-1", duration_s=4.5)
    outcome = run_plan(mixed_plan(away, capable=("decode-1",)))
    assert outcome.wrongs == []
    assert outcome.endings.keys() == {"finished", "no_capable_worker"}
    assert outcome.endings["no_capable_worker"] < len(NEEDING)


def test_fleet_without_capable_worker_serves_all_other_requests() -> None:
    outcome = run_plan(mixed_plan(capable=("prefill-0",), num_prefill=1))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 20, "no_capable_worker": 20}


def stale_plan() -> Plan:
    """A worker returns without the features while its heartbeats do not reach the scheduler. No
    request is sent to it while it is away: that one would fail, and no other would follow.
    """
    deaf = Fault(at_s=0.42, kind="deaf", target="scheduler-0", other="decode-1", duration_s=1.0)
    back = Fault(at_s=0.43, kind="kill", target="decode-1", duration_s=0.02)
    return mixed_plan(
        deaf, back, capable=("decode-1", "decode-2"), changing=("decode-1",), num_decode=3
    )


def test_worker_refuses_what_it_could_serve_before_its_restart() -> None:
    outcome = run_plan(stale_plan())
    assert (outcome.wrongs, outcome.endings) == ([], {"finished": 40})


def test_oracle_finds_a_worker_that_does_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineWorker, "check_needs", lambda self, needs: None)
    wrongs = run_plan(stale_plan()).wrongs
    assert any(each.startswith("decode-1: runs r") for each in wrongs), wrongs


def _everyone(right: Any) -> Any:
    return lambda self, features: np.ones(len(self), dtype=np.bool_)


def planted_outcome(
    monkeypatch: pytest.MonkeyPatch, owner: Any, attribute: str, make: Callable[[Any], Any]
) -> Outcome:
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))
    capable = ("decode-1", "decode-2", "prefill-1")
    plan = mixed_plan(lose("decode-1", 1.0), capable=capable, num_decode=4, num_prefill=2)
    return run_plan(plan)


@pytest.mark.parametrize(
    ("owner", "attribute", "make", "wrong"),
    [
        (Stream, "remaining_request", needs_forgotten, "lacks what it needs"),
        (Decision, "__init__", candidates_unfiltered, "prefill-0: runs r"),
        (WorkerTable, "_having", _everyone, "decode-0: runs r"),
    ],
    ids=["resubmission", "prefill candidates", "placement"],
)
def test_oracle_finds_planted_bugs(
    owner: Any,
    attribute: str,
    make: Callable[[Any], Any],
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome = planted_outcome(monkeypatch, owner, attribute, make)
    assert any(wrong in each for each in outcome.wrongs), outcome.wrongs
