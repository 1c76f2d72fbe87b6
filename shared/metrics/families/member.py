"""One process of the fleet, and families with one series for each of several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.messages import Heartbeat

L = TypeVar("L")


class Member(NamedTuple):
    """A process's last heartbeat. `is_live` is the judgement of the process that made this."""

    heartbeat: Heartbeat
    is_live: bool = True


class Value(NamedTuple):
    """A metric of which each process has one value. Counters: `name` without `_total`."""

    name: str
    text: str
    of: Callable[..., float]
    is_counter: bool = False


def families(
    values: Iterable[Value], prefix: str, label: str, loads: Iterable[tuple[str, L]]
) -> Iterator[Metric]:
    """Yields a metric for each of `values`. `loads` are by process id, which is the value of
    `label`.
    """
    loads = tuple(loads)
    for each in values:
        kind = CounterMetricFamily if each.is_counter else GaugeMetricFamily
        family = kind(f"{prefix}_{each.name}", each.text, labels=[label])
        for process_id, load in loads:
            family.add_metric([process_id], each.of(load))
        yield family
