from __future__ import annotations

import msgspec

from services.gateway.metrics import GatewayMetrics
from shared.messages import GatewayLoad, Heartbeat, IndexLoad, WorkerLoad


def test_fleet_counters_are_labelled_by_process() -> None:
    gateway = Heartbeat(
        process_id="gateway-1",
        epoch=1,
        sequence_number=1,
        roles=("gateway",),
        state="ready",
        interval_s=0.25,
        num_impostors=3,
    )
    load = WorkerLoad(step=1, step_budget_s=1.0, num_kv_frames=70, num_corrupt_kv_frames=2)
    load = msgspec.structs.replace(load, num_late_masks=4, num_failed_grammars=1)
    decode = msgspec.structs.replace(
        gateway, process_id="decode-1", roles=("decode",), load=load, num_impostors=0
    )
    prefill = msgspec.structs.replace(
        decode,
        process_id="prefill-1",
        roles=("prefill",),
        load=WorkerLoad(
            step=1, step_budget_s=1.0, saved_kv_bytes=4096, num_failed_steps=3, expert_imbalance=1.5
        ),
    )
    indices = [
        msgspec.structs.replace(gateway, process_id=process_id, roles=("kv_index",), index=index)
        for process_id, index in (
            ("kv_index-1", IndexLoad(state="exact", num_blocks=5, num_resyncs=2)),
            ("kv_index-2", IndexLoad(state="degraded")),
        )
    ]
    metrics = GatewayMetrics()
    metrics.watch_fleet(lambda: [gateway, decode, prefill, *indices])
    text = metrics.render().decode()
    for line in (
        'hearth_worker_kv_frames_total{outcome="taken",worker="decode-1"} 70.0',
        'hearth_worker_kv_frames_total{outcome="corrupt",worker="decode-1"} 2.0',
        'hearth_worker_kv_saved_bytes_total{worker="prefill-1"} 4096.0',
        'hearth_worker_failed_steps_total{operation="step",worker="prefill-1"} 3.0',
        'hearth_worker_failed_steps_total{operation="zeroing",worker="decode-1"} 0.0',
        'hearth_worker_expert_imbalance{worker="prefill-1"} 1.5',
        'hearth_worker_grammars_total{outcome="late_mask",worker="decode-1"} 4.0',
        'hearth_worker_grammars_total{outcome="failed",worker="decode-1"} 1.0',
        'hearth_worker_grammars_total{outcome="abandoned_thread",worker="decode-1"} 0.0',
        'hearth_impostor_messages_total{process="gateway-1"} 3.0',
        'hearth_impostor_messages_total{process="decode-1"} 0.0',
        'hearth_kv_index_exact{process="kv_index-1"} 1.0',
        'hearth_kv_index_exact{process="kv_index-2"} 0.0',
        'hearth_kv_index_blocks{process="kv_index-1"} 5.0',
        'hearth_kv_index_resyncs_total{process="kv_index-1"} 2.0',
    ):
        assert line in text
    assert 'hearth_worker_expert_imbalance{worker="decode-1"}' not in text


def test_durations_fall_into_their_buckets() -> None:
    metrics = GatewayMetrics()
    for duration_s in (0.001, 0.0015, 0.002, 99.0):
        metrics.observe_itl(duration_s)
    metrics.observe_ttft(0.5)
    lines = metrics.render().decode().splitlines()
    for line in (
        'hearth_gateway_itl_seconds_bucket{le="0.001"} 1.0',
        'hearth_gateway_itl_seconds_bucket{le="0.002"} 3.0',
        'hearth_gateway_itl_seconds_bucket{le="5.0"} 3.0',
        'hearth_gateway_itl_seconds_bucket{le="+Inf"} 4.0',
        "hearth_gateway_itl_seconds_count 4.0",
        "hearth_gateway_itl_seconds_sum 99.0045",
        "hearth_gateway_ttft_seconds_sum 0.5",
    ):
        assert line in lines


def test_reports_of_numerics_are_counted() -> None:
    metrics = GatewayMetrics()
    metrics.count_numerics_change()
    metrics.count_unlike_prefill()
    metrics.count_unlike_prefill()
    text = metrics.render().decode()
    assert "hearth_gateway_numerics_changed_total 1.0" in text
    assert "hearth_gateway_unlike_prefills_total 2.0" in text
    assert metrics.load() == GatewayLoad(num_unlike_prefills=2, num_numerics_changes=1)
