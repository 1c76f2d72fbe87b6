from __future__ import annotations

from services.gateway.observability.telemetry.recent_requests import (
    MAX_REJECTED,
    MAX_SERVED,
    MAX_TENANTS,
    RecentRequests,
)
from shared.telemetry.timeline import Timeline, Try


def timeline(number: int, tenant_id: str = "a", *, is_served: bool = True) -> Timeline:
    return Timeline(
        request_id=f"r{number}",
        tenant_id=tenant_id,
        gateway_id="g",
        model="m",
        outcome="stop" if is_served else "invalid_request",
        started_at=float(number),
        duration_s=1.0,
        tries=(Try(number=1, outcome="finished"),) * 2 if is_served else (),
    )


def test_latest_come_first_and_tenants_see_their_own() -> None:
    recent = RecentRequests()
    for number, tenant_id in enumerate("abab"):
        recent.add(timeline(number, tenant_id))
    assert [each.request_id for each in recent.of(None)] == ["r3", "r2", "r1", "r0"]
    assert [each.request_id for each in recent.of("a")] == ["r2", "r0"]
    assert recent.of("c") == []
    assert recent.of("a")[0].num_resubmissions == 1


def test_rejected_requests_displace_no_served_ones() -> None:
    recent = RecentRequests()
    for number in range(2 * MAX_SERVED):
        recent.add(timeline(number))
        recent.add(timeline(number, is_served=False))
    outcomes = [each.outcome for each in recent.of("a")]
    assert outcomes.count("stop") == MAX_SERVED
    assert outcomes.count("invalid_request") == MAX_REJECTED


def test_tenants_that_sent_nothing_for_longest_are_forgotten() -> None:
    recent = RecentRequests()
    recent.add(timeline(0, "first"))
    recent.add(timeline(1, "second"))
    recent.add(timeline(2, "first"))
    for number in range(MAX_TENANTS - 1):
        recent.add(timeline(number, f"t{number}"))
    assert len(recent.of("first")) == 2
    assert recent.of("second") == []
