"""Metrics of Redis's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric


class MemoryUse(NamedTuple):
    """The bytes that Redis uses, and its limit, `maxmemory`; 0 means no limit."""

    used: int
    limit: int


def redis_families(memory: MemoryUse | None) -> Iterator[Metric]:
    """Yields the metrics of the memory, or nothing if it is None: Redis does not answer."""
    if memory is None:
        return
    yield GaugeMetricFamily(
        "hearth_redis_used_memory_bytes", "Memory that Redis uses.", memory.used
    )
    yield GaugeMetricFamily(
        "hearth_redis_max_memory_bytes",
        "Memory that it may use, its maxmemory; 0: any.",
        memory.limit,
    )
