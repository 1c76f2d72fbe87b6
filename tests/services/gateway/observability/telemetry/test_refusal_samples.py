from __future__ import annotations

import json
import random

import pytest
import structlog

from services.gateway.observability.telemetry import refusal_samples
from services.gateway.observability.telemetry.refusal_samples import INTERVAL_S, RefusalSamples
from services.gateway.observability.telemetry.telemetry import RequestTelemetry
from shared.errors import Overloaded
from tests.shared.test_store import ManualClock


def test_first_refusal_is_logged_then_their_number_each_interval() -> None:
    samples, now = RefusalSamples(), 5.0
    found = [samples.counts_to_log("a", "overloaded", now) for _ in range(1000)]
    assert found == [(1, 0)] + [None] * 999
    assert samples.counts_to_log("b", "overloaded", now) == (1, 0)
    assert samples.counts_to_log("a", "invalid_request", now) == (1, 0)
    assert samples.counts_to_log("a", "overloaded", now + INTERVAL_S) == (1000, 0)


def test_keys_are_bounded_and_no_line_counts_others_as_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusal_samples, "MAX_KEYS", 3)
    samples = RefusalSamples()
    logged = [samples.counts_to_log(f"tenant-{each}", "overloaded", 0.0) for each in range(100)]
    assert [*filter(None, logged)] == [(1, 0)] * 4
    assert samples.counts_to_log("tenant-99", "overloaded", INTERVAL_S) == (1, 96)


def test_no_refusal_is_lost_or_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_samples, "MAX_KEYS", 3)
    samples, tenants = RefusalSamples(), random.Random(1)
    sent = [(tenants.randrange(8), number * 0.5) for number in range(5000)]
    sent += [*((tenant, 1e4) for tenant in range(8)), (0, 1e5)]
    logged = [samples.counts_to_log(f"{tenant}", "overloaded", now) for tenant, now in sent]
    assert sum(map(sum, filter(None, logged))) == len(sent)


def test_flood_of_one_tenant_is_a_few_lines_and_other_tenants_keep_theirs() -> None:
    clock = ManualClock()
    telemetry = RequestTelemetry("gateway-1", clock, lambda: 0.0)
    with structlog.testing.capture_logs() as lines:
        for number in range(2000):
            clock.at += 0.01
            record = telemetry.begin(f"request-{number}")
            record.tenant_id = "loud"
            telemetry.refused(record, Overloaded("too many requests", retry_after_s=1.0))
        record = telemetry.begin("quiet-1")
        record.tenant_id = "quiet"
        telemetry.refused(record, Overloaded("too many requests", retry_after_s=1.0))
    found = [(each["tenant"], each.get("num_refusals", 1)) for each in lines]
    assert found == [("loud", 1), ("loud", 1000), ("quiet", 1)], json.dumps(found)
    assert telemetry.find("request-1999") is not None
