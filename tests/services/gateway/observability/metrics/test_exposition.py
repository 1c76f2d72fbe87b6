"""The text of a gateway's metrics is what prometheus_client makes of them."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily

from services.gateway.observability.metrics.exposition import exposition
from tests.deploy.exposed import gateway_metrics


def test_own_families_have_the_bytes_of_prometheus_client() -> None:
    registry = gateway_metrics().registry
    text = exposition(registry.collect())
    assert text.count(b"\n") > 300
    assert text == generate_latest(registry)


def test_values_and_labels_are_written_as_prometheus_client_does() -> None:
    class Odd:
        def collect(self) -> list[GaugeMetricFamily]:
            family = GaugeMetricFamily("odd", 'a "text"\nwith \\', labels=["b", "a"])
            for value in (0, 1e6, 1.5e-9, 123456789.25, float("inf"), float("nan"), True):
                family.add_metric(['x"y\n\\', str(value)], value)
            return [family]

    assert exposition(Odd().collect()) == generate_latest(Odd())  # type: ignore[arg-type]
