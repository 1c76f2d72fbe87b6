"""Exports the load of the processes that render, tokenize and check requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class PoolLoad(Protocol):
    """The load of a pool of processes. `num_waiting` counts the jobs of its longest queue,
    `num_running` jobs, and `num_lost` the processes that ended while they ran one.
    """

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_lost(self) -> int: ...


def preparation_families(loads: Mapping[str, PoolLoad]) -> Iterator[Metric]:
    """Yields the metrics of the loads, which are given by pool."""
    jobs = GaugeMetricFamily(
        "hearth_preparation_jobs",
        "Jobs for preparation processes: running, or waiting in the longest queue of the pool.",
        labels=["pool", "state"],
    )
    lost = CounterMetricFamily(
        "hearth_preparation_processes_lost",
        "Preparation processes that ended, or were killed, while they ran a job.",
        labels=["pool"],
    )
    for pool, load in loads.items():
        jobs.add_metric([pool, "waiting"], load.num_waiting)
        jobs.add_metric([pool, "running"], load.num_running)
        lost.add_metric([pool], load.num_lost)
    yield from (jobs, lost)
