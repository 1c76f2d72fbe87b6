"""Gauges for an autoscaler, from the heartbeats of schedulers."""

from __future__ import annotations

from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from shared.metrics.families.member import Member
from tests.shared.metrics.test_role_demands import demand, scheduler


def test_gateway_exports_gauges_by_model_and_role() -> None:
    metrics = GatewayMetrics()
    beats = [scheduler(1, demand("a", 3, 4)), scheduler(2, demand("a", 5, 1))]
    metrics.watch_fleet(lambda: [Member(each) for each in beats])
    text = metrics.render().decode()
    for line in (
        'hearth_wanted_workers{model="a",role="prefill"} 5.0',
        'hearth_workers{model="a",role="prefill"} 2.0',
        'hearth_queued_requests{model="a",role="prefill"} 5.0',
        'hearth_queued_tokens{model="a",role="prefill"} 500.0',
        'hearth_queued_work_seconds{model="a",role="prefill"} 2.5',
    ):
        assert line in text
