"""Samples of a gateway's metrics."""

from __future__ import annotations

from services.gateway.service import GatewayService


def sample_sum(gateway: GatewayService, name: str, **labels: str) -> float:
    """The sum over all series that have these labels; 0 without any."""
    return sum(
        sample.value
        for family in gateway.metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
