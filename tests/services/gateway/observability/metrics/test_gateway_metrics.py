"""What a gateway counts itself, and that no client makes its metrics grow or break."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from shared.errors import InvalidRequest
from shared.messages import GatewayLoad
from shared.metrics.families.member import Member
from shared.telemetry.timeline import Phase, Timeline, Try
from tests.services.gateway.peer import CARD
from tests.shared.metrics.test_families import heartbeat, worker_load


def ended(metrics: GatewayMetrics, tenant: str, *, model: str = "m", outcome: str = "stop") -> None:
    metrics.count_ended(outcome, model=model, dialect="openai", tenant=tenant)
    metrics.count_tokens(model=model, tenant=tenant, prompt=5, cached=2, output=3, reasoning=1)


def timeline() -> Timeline:
    phases = (
        Phase(name="queue", process_id="s", start_s=0.0, duration_s=0.25),
        Phase(name="prefill", process_id="p", start_s=0.25, duration_s=1.5),
        Phase(name="kv_push", process_id="p", start_s=1.75, duration_s=0.01, num_bytes=5000),
        Phase(name="decode", process_id="d", start_s=1.8, duration_s=4.0),
    )
    return Timeline(
        request_id="r",
        tenant_id="t",
        gateway_id="g",
        model="m",
        outcome="stop",
        started_at=0.0,
        duration_s=6.0,
        num_prompt_tokens=150,
        num_output_tokens=20,
        tries=(Try(number=1, outcome="stop", phases=phases),),
    )


def test_durations_fall_into_their_buckets() -> None:
    metrics = GatewayMetrics()
    for duration_s in (0.001, 0.0015, 0.002, 99.0):
        metrics.itl_of("m").observe(duration_s)
    metrics.ttft_of("m").observe(0.5)
    lines = metrics.render().decode().splitlines()
    for line in (
        'hearth_inter_token_seconds_bucket{le="0.001",model="m"} 1.0',
        'hearth_inter_token_seconds_bucket{le="0.002",model="m"} 3.0',
        'hearth_inter_token_seconds_bucket{le="5.0",model="m"} 3.0',
        'hearth_inter_token_seconds_bucket{le="+Inf",model="m"} 4.0',
        'hearth_inter_token_seconds_count{model="m"} 4.0',
        'hearth_inter_token_seconds_sum{model="m"} 99.0045',
        'hearth_time_to_first_token_seconds_sum{model="m"} 0.5',
    ):
        assert line in lines


def test_buckets_of_vllm_count_the_same_values() -> None:
    metrics = GatewayMetrics("gateway-1")
    for duration_s in (0.001, 0.04, 0.3, 3000.0):
        metrics.ttft_of("m").observe(duration_s)
    lines = metrics.render("vllm").decode().splitlines()
    label = 'engine="gateway-1"'
    for le, count in (("0.001", 1), ("0.04", 2), ("0.25", 2), ("0.5", 3), ("2560.0", 3)):
        name = "vllm:time_to_first_token_seconds_bucket"
        assert f'{name}{{{label},le="{le}",model_name="m"}} {count}.0' in lines


def test_timeline_fills_the_histograms_of_phases() -> None:
    metrics = GatewayMetrics("g")
    metrics.observe_timeline(timeline())
    metrics.observe_timeline(msgspec.structs.replace(timeline(), tries=()))  # rejected
    text = metrics.render().decode()
    for line in (
        'hearth_queue_seconds_sum{model="m"} 0.25',
        'hearth_prefill_seconds_sum{model="m"} 1.5',
        'hearth_transfer_seconds_sum{model="m"} 0.01',
        'hearth_handoff_bytes_sum{model="m"} 5000.0',
        'hearth_request_seconds_sum{model="m"} 6.0',
    ):
        assert line in text
    text = metrics.render("vllm").decode()
    for line in (
        'vllm:request_inference_time_seconds_sum{engine="g",model_name="m"} 5.5',
        'vllm:request_prompt_tokens_bucket{engine="g",le="200.0",model_name="m"} 1.0',
        'vllm:e2e_request_latency_seconds_count{engine="g",model_name="m"} 1.0',
    ):
        assert line in text


def test_heartbeats_report_the_same_counts() -> None:
    metrics = GatewayMetrics()
    metrics.count_numerics_change()
    metrics.count_unlike_prefill()
    metrics.count_unlike_prefill()
    metrics.count_resubmission("worker_lost", "decode-1")
    metrics.count_refused("rate_limited", dialect="openai", tenant="t")
    metrics.count_refused("overloaded", is_failed=True)
    for model in ("m", "n"):
        metrics.ttft_of(model).observe(0.0011)
    metrics.watch_open_streams(lambda: 7)
    ended(metrics, "t")
    lost = {"model": "m", "dialect": "openai", "tenant": "t"}
    metrics.count_ended("no_capacity", is_failed=True, is_lost=True, **lost)
    assert metrics.load() == GatewayLoad(
        num_unlike_prefills=2,
        num_numerics_changes=1,
        num_resubmissions=1,
        num_refused_requests=2,
        num_lost_streams=1,
        num_open_streams=7,
        num_requests=4,
        num_failed_requests=2,
        rejections=(("rate_limited", 1), ("overloaded", 1)),
        moved_streams=(("decode-1", 1),),
        ttft_counts=(0, 2),
    )
    assert 'hearth_resubmissions_total{reason="worker_lost"} 1.0' in metrics.render().decode()


def test_ten_thousand_tenants_have_a_bounded_number_of_series() -> None:
    metrics = GatewayMetrics()
    for number in range(10_000):
        ended(metrics, f"tenant-{number}")
        metrics.count_refused("rate_limited", dialect="openai", tenant=f"tenant-{number}")
    text = metrics.render().decode()
    assert len(text.splitlines()) < 201 * 6 + 300
    assert (
        'hearth_requests_total{dialect="openai",model="m",outcome="stop",tenant="other"} 9800.0'
        in text
    )


def test_series_of_a_model_end_when_it_leaves_the_registry() -> None:
    metrics = GatewayMetrics()
    for model in ("a", "b"):
        ended(metrics, "t", model=model)
        metrics.ttft_of(model).observe(1.0)
    metrics.count_refused("invalid_request")
    metrics.retain_models(["b"])
    text = metrics.render().decode()
    assert 'model="a"' not in text and 'model="b"' in text
    assert 'outcome="invalid_request"' in text


@pytest.mark.parametrize("name", ['a"b', "line\nbreak", "back\\slash", "ä" * 256, "{}=,"])
def test_any_name_gives_a_valid_exposition(name: str) -> None:
    metrics = GatewayMetrics(name)
    ended(metrics, name, model=name)
    metrics.ttft_of(name).observe(1.0)
    for names, label in (("hearth", "model"), ("vllm", "model_name")):
        text = metrics.render(names).decode()
        labels = [sample.labels for family in parsed(text) for sample in family.samples]
        assert {each[label] for each in labels if each.get(label)} == {name}


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match="names: 'sglang' is not hearth or vllm"):
        GatewayMetrics().render("sglang")


def test_steps_of_workers_by_their_tokens_under_vllms_name() -> None:
    load = worker_load(
        num_steps_by_tokens=(0, 3, *(0,) * 10, 1, 1),
        num_generated_tokens=20,
        num_computed_prompt_tokens=40_000,
    )
    metrics = GatewayMetrics()
    older = worker_load(num_generated_tokens=1)
    fleet = {"decode-1": load, "decode-2": older}
    metrics.watch_fleet(
        lambda: [Member(heartbeat(name, load=each, model=CARD)) for name, each in fleet.items()]
    )
    lines = metrics.render("vllm").decode().splitlines()
    labels = f'engine="decode-1",{{}}model_name="{CARD.name}"'
    for bound, count in (("1.0", 0), ("8.0", 3), ("16384.0", 4), ("+Inf", 5)):
        bucket = labels.format(f'le="{bound}",')
        assert f"vllm:iteration_tokens_total_bucket{{{bucket}}} {count}.0" in lines
    assert f"vllm:iteration_tokens_total_sum{{{labels.format('')}}} 40020.0" in lines
    assert not any("iteration" in each and "decode-2" in each for each in lines)
    adapters = labels.format('max_lora="0",') + ',running_lora_adapters="",waiting_lora_adapters=""'
    assert f"vllm:lora_requests_info{{{adapters}}} 0.0" in lines
