from __future__ import annotations

import json

import pytest
import structlog

from services.gateway.telemetry import refusal_samples
from services.gateway.telemetry.refusal_samples import INTERVAL_S, RefusalSamples
from services.gateway.telemetry.telemetry import RequestTelemetry
from shared.errors import Overloaded
from tests.shared.test_store import ManualClock


def test_first_refusal_is_logged_then_their_number_each_interval() -> None:
    samples, now = RefusalSamples(), 5.0
    assert [samples.num_to_log("a", "overloaded", now) for _ in range(1000)] == [1] + [0] * 999
    assert samples.num_to_log("b", "overloaded", now) == 1
    assert samples.num_to_log("a", "invalid_request", now) == 1
    assert samples.num_to_log("a", "overloaded", now + INTERVAL_S) == 1000


def test_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_samples, "MAX_KEYS", 3)
    samples = RefusalSamples()
    logged = [samples.num_to_log(f"tenant-{each}", "overloaded", 0.0) for each in range(100)]
    assert sum(map(bool, logged)) == 4
    assert samples.num_to_log("tenant-99", "overloaded", INTERVAL_S) == 1  # the first have gone


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
