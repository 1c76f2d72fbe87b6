"""Operations of workers' devices that raised, and errors that a GPU reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric

from shared.messages import DeviceHealth, WorkerLoad


class FailedOperations(NamedTuple):
    num_steps: int = 0
    num_zeroings: int = 0
    num_xids: int = 0
    num_ecc_errors: int = 0
    num_faults: int = 0

    def plus(self, other: FailedOperations) -> FailedOperations:
        return FailedOperations(*map(sum, zip(self, other, strict=True)))


def failed_operations(load: WorkerLoad) -> FailedOperations:
    health = load.device_health or DeviceHealth()
    return FailedOperations(
        load.num_failed_steps,
        load.num_failed_zeroings,
        health.num_xids,
        health.num_ecc_errors,
        int(bool(health.fault)),
    )


def failed_families(
    loads: Iterable[tuple[str, WorkerLoad]], before: Mapping[str, FailedOperations]
) -> Iterator[Metric]:
    """Counts failures of present workers. `before` has those of stopped workers of the same ids,
    which count further: the counter of a worker that failed and was restarted does not fall.
    """
    totals, watched = dict(before), set[str]()
    for worker_id, load in loads:
        totals[worker_id] = totals.get(worker_id, FailedOperations()).plus(failed_operations(load))
        if load.device_health is not None:
            watched.add(worker_id)
    operations = CounterMetricFamily(
        "hearth_worker_failed_steps",
        "Operations of a worker's device that raised: step or zeroing. Gateways keep the counts "
        "of workers that have stopped.",
        labels=["worker", "operation"],
    )
    errors = CounterMetricFamily(
        "hearth_worker_gpu_errors",
        "What NVML reported of a worker's GPU: xid, ecc (uncorrected), and fault, which ends the "
        "worker. Gateways keep the counts of workers that have stopped.",
        labels=["worker", "kind"],
    )
    for worker_id, failed in totals.items():
        operations.add_metric([worker_id, "step"], failed.num_steps)
        operations.add_metric([worker_id, "zeroing"], failed.num_zeroings)
        if worker_id in watched or any(failed[2:]):
            errors.add_metric([worker_id, "xid"], failed.num_xids)
            errors.add_metric([worker_id, "ecc"], failed.num_ecc_errors)
            errors.add_metric([worker_id, "fault"], failed.num_faults)
    yield from (operations, errors)
