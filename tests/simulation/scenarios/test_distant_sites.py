"""Fleets whose sites are far apart: a round trip takes longer than the shortest timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import combinations
from statistics import median
from typing import Literal

import pytest

from services.scheduler.backlog import QueuedRequest
from services.scheduler.decode_starts import DecodeStarts
from services.scheduler.placement import Target
from shared.engine.executors.timing_executor import FIRST_TOKEN_ID
from shared.transport.round_trips import RoundTrips
from tests.simulation.plan import Fault, FleetPlan, Plan, RequestPlan
from tests.simulation.scenarios import fleets
from tests.simulation.scenarios.fleets import patient_request
from tests.simulation.simulation import Outcome, run_plan

NUM_REQUESTS = 20
FLEET = replace(fleets.FLEET, num_prefill=1, num_blocks=256)
PROCESSES = [process_id for ids in FLEET.process_ids.values() for process_id in ids]
WORKERS = ("prefill-0", "decode-0", "decode-1")
Layout = Literal["workers far", "all far"]
ROUND_TRIPS_S = (0.12, 0.3)


def fleet_with(round_trip_s: float, layout: Layout) -> FleetPlan:
    """`workers far`: the workers are at one site, all others at another. `all far`: each process
    is at a site of its own.
    """
    one_way_s = round_trip_s / 2
    if layout == "workers far":
        regions = dict.fromkeys(WORKERS, "far")
        return replace(FLEET, regions=regions, delays_s={("", "far"): one_way_s})
    delays_s: Mapping[tuple[str, str], float] = dict.fromkeys(combinations(PROCESSES, 2), one_way_s)
    return replace(FLEET, regions={each: each for each in PROCESSES}, delays_s=delays_s)


def requests() -> tuple[RequestPlan, ...]:
    """Every second prompt is long enough for a handoff."""
    return tuple(
        patient_request(
            n,
            [FIRST_TOKEN_ID + 40 * n + i for i in range(4 + 32 * (n % 2))],
            at_s=0.5 + 0.05 * n,
        )
        for n in range(NUM_REQUESTS)
    )


@cache
def outcome_at(round_trip_s: float, layout: Layout = "workers far") -> Outcome:
    fleet = fleet_with(round_trip_s, layout)
    return run_plan(Plan(seed=1, fleet=fleet, requests=requests(), faults=()))


@pytest.mark.parametrize("layout", ["workers far", "all far"])
@pytest.mark.parametrize("round_trip_s", ROUND_TRIPS_S)
def test_every_request_finishes_between_distant_sites(round_trip_s: float, layout: Layout) -> None:
    outcome = outcome_at(round_trip_s, layout)
    assert outcome.endings == {"finished": NUM_REQUESTS}
    assert outcome.wrongs == []
    assert outcome.events["prefill_attempt_failed"] == 0
    at_once = median(outcome_at(0.0).durations_s)
    assert median(outcome.durations_s) <= at_once + 8 * round_trip_s


def test_start_that_is_answered_late_is_kept() -> None:
    """The first round trips are longer than the wait for a worker that has not been measured."""
    outcome = outcome_at(0.8)
    assert outcome.endings == {"finished": NUM_REQUESTS}
    assert outcome.wrongs == []
    assert outcome.events["worker_closed"] == 0


def deaf_to_scheduler(*worker_ids: str) -> tuple[Fault, ...]:
    """The workers are alive and send heartbeats, but no command reaches them."""
    return tuple(
        Fault(at_s=0.0, kind="deaf", target=each, other="scheduler-0", duration_s=30.0)
        for each in worker_ids
    )


@pytest.mark.each_value
@pytest.mark.parametrize("round_trip_s", [0.0, 0.3])
@pytest.mark.parametrize("num_requests", [1, NUM_REQUESTS])
def test_requests_are_refused_when_no_worker_answers(
    round_trip_s: float, num_requests: int
) -> None:
    far = fleet_with(round_trip_s, "workers far")
    fleet, sent = replace(far, num_decode=5), requests()[:num_requests]
    faults = deaf_to_scheduler(*fleet.process_ids["decode"])
    outcome = run_plan(Plan(seed=1, fleet=fleet, requests=sent, faults=faults))
    assert outcome.endings == {"no_capacity": num_requests}
    assert outcome.wrongs == []
    assert max(outcome.durations_s) <= 5.0


def test_requests_avoid_a_worker_that_does_not_answer() -> None:
    faults = deaf_to_scheduler("decode-0")
    outcome = run_plan(Plan(seed=1, fleet=FLEET, requests=requests(), faults=faults))
    assert outcome.endings == {"finished": NUM_REQUESTS}
    assert outcome.wrongs == []
    assert max(outcome.durations_s) < 1.0


def test_oracle_finds_fixed_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: no round trip is measured, and a start that is answered late is aborted."""
    monkeypatch.setattr(RoundTrips, "record", lambda self, peer, measured_s, now: None)
    monkeypatch.setattr(DecodeStarts, "_take_late", abort_late_start)
    plan = Plan(seed=1, fleet=fleet_with(0.8, "workers far"), requests=requests(), faults=())
    outcome = run_plan(plan)
    assert outcome.endings["finished"] < NUM_REQUESTS
    assert any("lacked what it needs for no more than 0 s" in each for each in outcome.wrongs)


right = DecodeStarts._take_late


def abort_late_start(
    self: DecodeStarts, ticket: QueuedRequest, target: Target, placement_id: bytes, _: object
) -> None:
    right(self, ticket, target, placement_id, None)
