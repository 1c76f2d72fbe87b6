"""The log's lines of rejected requests."""

from __future__ import annotations

import structlog

from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.metrics.rejection_log import RejectionLog
from shared.clock import MonotonicClock


def test_wrong_keys_and_lack_of_capacity_are_one_warning_each() -> None:
    metrics = GatewayMetrics()
    rejections = RejectionLog(metrics.rejections, MonotonicClock())
    for _ in range(533):
        metrics.count_refused("invalid_api_key")
        metrics.count_refused("context_length_exceeded", dialect="openai", tenant="t")
    queued = {"model": "m", "dialect": "openai", "tenant": "t", "is_failed": True}
    for is_lost in (False, False, True):  # the third one after output
        metrics.count_ended("overloaded", is_lost=is_lost, **queued)
    with structlog.testing.capture_logs() as lines:
        rejections.log_new()
        rejections.log_new()
        metrics.count_refused("invalid_api_key")
        rejections.log_new()
    assert [(each["code"], each["num_requests"]) for each in lines] == [
        ("invalid_api_key", 533),
        ("overloaded", 2),
        ("invalid_api_key", 1),
    ]
    assert {(each["event"], each["log_level"]) for each in lines} == {
        ("requests_rejected", "warning")
    }
