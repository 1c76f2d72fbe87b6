"""Counts of failed steps outlive the workers whose steps failed."""

from __future__ import annotations

from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.metrics.stopped_workers import MAX_WORKERS, StoppedWorkers
from shared.messages import DeviceHealth
from shared.metrics.families.member import Member
from tests.shared.metrics.test_families import heartbeat, worker_load

FAILED = "hearth_worker_failed_steps_total"


def series(metrics: GatewayMetrics) -> list[str]:
    return [line for line in metrics.render().decode().splitlines() if line.startswith(FAILED)]


def test_counts_stay_and_those_of_the_next_process_are_added() -> None:
    metrics = GatewayMetrics("gateway-1")
    failed = worker_load(num_failed_steps=2, num_failed_zeroings=1)
    metrics.stopped_workers.observe(heartbeat("decode-1", load=failed, state="stopped"))
    metrics.stopped_workers.observe(heartbeat("decode-2", load=worker_load(), state="stopped"))
    metrics.stopped_workers.observe(heartbeat("decode-3", load=failed, state="draining"))
    assert series(metrics) == [
        FAILED + '{operation="step",worker="decode-1"} 2.0',
        FAILED + '{operation="zeroing",worker="decode-1"} 1.0',
    ]
    again = heartbeat("decode-1", load=worker_load(num_failed_steps=3))
    metrics.watch_fleet(lambda: [Member(again)])
    assert FAILED + '{operation="step",worker="decode-1"} 5.0' in series(metrics)
    metrics.stopped_workers.observe(heartbeat("decode-1", load=again.load, state="stopped"))
    metrics.watch_fleet(lambda: [])
    assert FAILED + '{operation="step",worker="decode-1"} 5.0' in series(metrics)


def test_fault_of_a_gpu_stays() -> None:
    metrics = GatewayMetrics("gateway-1")
    load = worker_load(device_health=DeviceHealth(num_xids=1, fault="Xid 79"))
    for _ in range(2):
        metrics.stopped_workers.observe(heartbeat("decode-1", load=load, state="stopped"))
    found = metrics.render().decode()
    assert 'hearth_worker_gpu_errors_total{kind="fault",worker="decode-1"} 2.0' in found


def test_stopped_workers_show_nothing_else() -> None:
    metrics = GatewayMetrics("gateway-1")
    failed = worker_load(num_failed_steps=1)
    metrics.stopped_workers.observe(heartbeat("decode-1", load=failed, state="stopped"))
    text = metrics.render().decode()
    assert [line for line in text.splitlines() if "decode-1" in line] == series(metrics)


def test_bounded() -> None:
    workers = StoppedWorkers()
    for number in range(MAX_WORKERS + 1):
        load = worker_load(num_failed_steps=1)
        workers.observe(heartbeat(f"decode-{number}", load=load, state="stopped"))
    assert len(workers.failed) == MAX_WORKERS
    assert "decode-0" not in workers.failed
