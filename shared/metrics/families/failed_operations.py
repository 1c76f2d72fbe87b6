"""Operations of workers' devices that raised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric

from shared.messages import WorkerLoad


class FailedOperations(NamedTuple):
    num_steps: int
    num_zeroings: int


def failed_operations(load: WorkerLoad) -> FailedOperations:
    return FailedOperations(load.num_failed_steps, load.num_failed_zeroings)


def failed_family(
    loads: Iterable[tuple[str, WorkerLoad]], before: Mapping[str, FailedOperations]
) -> Metric:
    """Counts failed operations of present workers. `before` has those of stopped workers of the
    same ids, which count further: the counter of a worker that failed and was restarted does not
    fall.
    """
    totals = dict(before)
    for worker_id, load in loads:
        steps, zeroings = totals.get(worker_id, (0, 0))
        failed = failed_operations(load)
        totals[worker_id] = FailedOperations(
            steps + failed.num_steps, zeroings + failed.num_zeroings
        )
    family = CounterMetricFamily(
        "hearth_worker_failed_steps",
        "Operations of a worker's device that raised: step or zeroing. Gateways keep the counts "
        "of workers that have stopped.",
        labels=["worker", "operation"],
    )
    for worker_id, failed in totals.items():
        family.add_metric([worker_id, "step"], failed.num_steps)
        family.add_metric([worker_id, "zeroing"], failed.num_zeroings)
    return family
