"""Families of the processes that render, tokenize and check what clients send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.gateway.text.preparation_pool import PreparationPool


def preparation_families(pools: Mapping[str, PreparationPool]) -> Iterator[Metric]:
    jobs = GaugeMetricFamily(
        "hearth_preparation_jobs",
        "Jobs for preparation processes: waiting, or running.",
        labels=["pool", "state"],
    )
    lost = CounterMetricFamily(
        "hearth_preparation_processes_lost",
        "Preparation processes that ended, or were killed, while they ran a job.",
        labels=["pool"],
    )
    for name, pool in pools.items():
        jobs.add_metric([name, "waiting"], pool.num_waiting)
        jobs.add_metric([name, "running"], pool.num_running)
        lost.add_metric([name], pool.num_lost)
    yield from (jobs, lost)
