"""Metrics of the tenants of other sites that a gateway may serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class CopyCounts(NamedTuple):
    """By home site the number of tenants, and the seconds since the oldest confirmation of one."""

    tenants: Mapping[str, tuple[int, float]]
    num_rejected: int


def copy_families(counts: CopyCounts | None) -> Iterator[Metric]:
    """Yields the metrics, or nothing for a gateway without links."""
    if counts is None:
        return
    tenants = GaugeMetricFamily(
        "hearth_copied_tenants", "Tenants of another site that may be served here.", labels=["site"]
    )
    ages = GaugeMetricFamily(
        "hearth_copied_tenants_age_seconds",
        "Time since their home site has confirmed them; --stale-s ends their service.",
        labels=["site"],
    )
    for site, (count, age_s) in counts.tenants.items():
        tenants.add_metric([site], count)
        ages.add_metric([site], age_s)
    yield tenants
    yield ages
    yield CounterMetricFamily(
        "hearth_copied_tenants_rejected",
        "Copies of tenants that other sites sent and this one refused; the log has the reasons.",
        counts.num_rejected,
    )
