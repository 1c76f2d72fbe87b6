"""What heartbeats become, of each kind of process."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from shared.messages import (
    DeviceHealth,
    DeviceMemory,
    DevicePeaks,
    GatewayLoad,
    Heartbeat,
    HostedModel,
    HostLoad,
    IndexLoad,
    LinkLoad,
    RoleDemand,
    SchedulerLoad,
    StoreLoad,
    WorkerLoad,
)
from shared.metrics.families.fleet import FleetCollector
from shared.metrics.families.member import Member


def heartbeat(process_id: str, **fields: Any) -> Heartbeat:
    fields = {"roles": (process_id.partition("-")[0],), "state": "ready", **fields}
    return Heartbeat(process_id=process_id, epoch=1, sequence_number=1, interval_s=0.25, **fields)


def exposition(*members: Member) -> str:
    registry = CollectorRegistry()
    registry.register(FleetCollector(lambda: members))
    return generate_latest(registry).decode()


def worker_load(**fields: Any) -> WorkerLoad:
    return WorkerLoad(step=1, step_budget_s=1.0, **fields)


def test_worker() -> None:
    decode = worker_load(
        num_running=3,
        num_total_blocks=100,
        num_free_blocks=25,
        num_preemptions=2,
        num_handoffs_in_flight=4,
        num_kv_frames=70,
        num_corrupt_kv_frames=2,
        num_late_masks=4,
        num_failed_grammars=1,
        num_kv_mismatches=2,
        num_failed_handoffs=6,
        traffic_bytes=3e20,
        num_operations=4e22,
        peaks=DevicePeaks(bytes_per_s=4.8e12, operations_per_s=989e12),
    )
    prefill = worker_load(saved_kv_bytes=4096, num_failed_steps=3, expert_imbalance=1.5)
    text = exposition(
        Member(heartbeat("decode-1", load=decode)), Member(heartbeat("prefill-1", load=prefill))
    )
    for line in (
        'hearth_worker_running_requests{worker="decode-1"} 3.0',
        'hearth_worker_kv_usage_ratio{worker="decode-1"} 0.75',
        'hearth_worker_kv_usage_ratio{worker="prefill-1"} 0.0',
        'hearth_worker_preemptions_total{worker="decode-1"} 2.0',
        'hearth_worker_handoffs_in_flight{worker="decode-1"} 4.0',
        'hearth_worker_kv_frames_total{outcome="taken",worker="decode-1"} 70.0',
        'hearth_worker_kv_frames_total{outcome="corrupt",worker="decode-1"} 2.0',
        'hearth_worker_kv_saved_bytes_total{worker="prefill-1"} 4096.0',
        'hearth_worker_failed_steps_total{operation="step",worker="prefill-1"} 3.0',
        'hearth_worker_failed_steps_total{operation="zeroing",worker="decode-1"} 0.0',
        'hearth_worker_expert_imbalance{worker="prefill-1"} 1.5',
        'hearth_worker_memory_traffic_bytes_total{worker="decode-1"} 3e+20',
        'hearth_worker_operations_total{worker="decode-1"} 4e+22',
        'hearth_worker_peak_bytes_per_second{worker="decode-1"} 4.8e+12',
        'hearth_worker_peak_operations_per_second{worker="decode-1"} 9.89e+14',
        'hearth_worker_kv_mismatches_total{worker="decode-1"} 2.0',
        'hearth_worker_failed_handoffs_total{worker="decode-1"} 6.0',
        'hearth_worker_grammars_total{outcome="late_mask",worker="decode-1"} 4.0',
        'hearth_worker_grammars_total{outcome="failed",worker="decode-1"} 1.0',
        'hearth_worker_grammars_total{outcome="abandoned_thread",worker="decode-1"} 0.0',
    ):
        assert line in text
    assert 'hearth_worker_expert_imbalance{worker="decode-1"}' not in text
    assert 'hearth_worker_peak_bytes_per_second{worker="prefill-1"}' not in text
    assert 'hearth_worker_kv_frames_total{outcome="taken",worker="prefill-1"}' not in text


def test_health_of_gpus() -> None:
    sick = DeviceHealth(num_xids=2, num_ecc_errors=1, throttles=("thermal",), fault="Xid 48")
    text = exposition(
        Member(heartbeat("decode-1", load=worker_load(device_health=sick))),
        Member(heartbeat("decode-2", load=worker_load(device_health=DeviceHealth()))),
        Member(heartbeat("decode-3", load=worker_load())),
    )
    for line in (
        'hearth_worker_gpu_errors_total{kind="xid",worker="decode-1"} 2.0',
        'hearth_worker_gpu_errors_total{kind="ecc",worker="decode-1"} 1.0',
        'hearth_worker_gpu_errors_total{kind="fault",worker="decode-1"} 1.0',
        'hearth_worker_gpu_errors_total{kind="fault",worker="decode-2"} 0.0',
        'hearth_worker_gpu_throttled{reason="thermal",worker="decode-1"} 1.0',
        'hearth_worker_gpu_throttled{reason="thermal",worker="decode-2"} 0.0',
    ):
        assert line in text
    assert 'gpu_errors_total{kind="fault",worker="decode-3"}' not in text


def test_process_is_live_and_ready() -> None:
    text = exposition(
        Member(heartbeat("decode-1", roles=("prefill", "decode"), release="1.2", region="eu")),
        Member(heartbeat("decode-2", state="standby", num_impostors=3, num_bus_reconnects=4)),
        Member(heartbeat("decode-4", num_failed_items=5)),
        Member(heartbeat("decode-3"), is_live=False),
    )
    for line in (
        'hearth_process_info{process="decode-1",region="eu",release="1.2"} 1.0',
        'hearth_process_live{process="decode-1",role="prefill"} 1.0',
        'hearth_process_ready{process="decode-1",role="decode"} 1.0',
        'hearth_process_live{process="decode-2",role="decode"} 1.0',
        'hearth_process_ready{process="decode-2",role="decode"} 0.0',
        'hearth_process_live{process="decode-3",role="decode"} 0.0',
        'hearth_process_ready{process="decode-3",role="decode"} 0.0',
        'hearth_impostor_messages_total{process="decode-2"} 3.0',
        'hearth_nats_reconnects_total{process="decode-2"} 4.0',
        'hearth_failed_items_total{process="decode-4"} 5.0',
    ):
        assert line in text


def test_scheduler_index_gateway_and_host() -> None:
    device = DeviceMemory(device="cuda:0", budget_bytes=100, used_bytes=60)
    models = tuple(
        HostedModel(name=name, revision="r", state=state, device="cuda:0")
        for name, state in (("a", "hot"), ("b", "standby"), ("c", "standby"))
    )
    text = exposition(
        Member(
            heartbeat(
                "scheduler-1", scheduler=SchedulerLoad(num_queued_requests=5, oldest_wait_s=1.5)
            )
        ),
        Member(
            heartbeat("kv_index-1", index=IndexLoad(state="exact", num_blocks=5, num_resyncs=2))
        ),
        Member(heartbeat("kv_index-2", index=IndexLoad(state="degraded"))),
        Member(heartbeat("gateway-1", gateway=GatewayLoad(num_open_streams=7, num_lost_streams=1))),
        Member(heartbeat("host-1", host=HostLoad(devices=(device,), models=models))),
    )
    for line in (
        'hearth_scheduler_queued_requests{scheduler="scheduler-1"} 5.0',
        'hearth_scheduler_oldest_wait_seconds{scheduler="scheduler-1"} 1.5',
        'hearth_kv_index_exact{process="kv_index-1"} 1.0',
        'hearth_kv_index_exact{process="kv_index-2"} 0.0',
        'hearth_kv_index_blocks{process="kv_index-1"} 5.0',
        'hearth_kv_index_resyncs_total{process="kv_index-1"} 2.0',
        'hearth_gateway_open_streams{gateway="gateway-1"} 7.0',
        'hearth_gateway_lost_streams_total{gateway="gateway-1"} 1.0',
        'hearth_host_memory_used_bytes{device="cuda:0",host="host-1"} 60.0',
        'hearth_host_models{host="host-1",state="standby"} 2.0',
    ):
        assert line in text


def test_a_lost_scheduler_asks_for_no_worker() -> None:
    demand = RoleDemand(
        model="m",
        role="decode",
        num_queued_requests=3,
        num_queued_tokens=300,
        work_s=1.5,
        num_workers=1,
        num_wanted_workers=4,
    )
    beat = heartbeat("scheduler-1", scheduler=SchedulerLoad(demands=(demand,)))
    wanted = 'hearth_wanted_workers{model="m",role="decode"} 4.0'
    assert wanted in exposition(Member(beat))
    assert wanted not in exposition(Member(beat, is_live=False))


def test_redis_of_the_processes_that_use_it() -> None:
    away = StoreLoad(is_away=True, num_failures=3, num_reconnects=2)
    text = exposition(
        Member(heartbeat("gateway-1", store=away)),
        Member(heartbeat("kv_index-1", store=StoreLoad())),
        Member(heartbeat("decode-1")),
    )
    for line in (
        'hearth_redis_breaker_open{process="gateway-1"} 1.0',
        'hearth_redis_failures_total{process="gateway-1"} 3.0',
        'hearth_redis_reconnects_total{process="gateway-1"} 2.0',
        'hearth_redis_breaker_open{process="kv_index-1"} 0.0',
    ):
        assert line in text
    assert 'hearth_redis_failures_total{process="decode-1"}' not in text


def test_links() -> None:
    link = LinkLoad(
        site="b", region="us", round_trip_s=0.02, sent_bytes=5, num_placed=7, num_spilled=3
    )
    gateway = heartbeat("gateway-1", links=(LinkLoad(site="b", is_cut=True, num_moved=2),))
    text = exposition(Member(heartbeat("scheduler-1", links=(link,))), Member(gateway))
    for line in (
        'hearth_link_up{process="scheduler-1",region="us",site="b"} 1.0',
        'hearth_link_up{process="gateway-1",region="",site="b"} 0.0',
        'hearth_link_round_trip_seconds{process="scheduler-1",site="b"} 0.02',
        'hearth_link_sent_bytes_total{process="scheduler-1",site="b"} 5.0',
        'hearth_link_placed_requests_total{process="scheduler-1",site="b"} 7.0',
        'hearth_link_spilled_requests_total{process="scheduler-1",site="b"} 3.0',
        'hearth_link_moved_streams_total{process="gateway-1",site="b"} 2.0',
    ):
        assert line in text
