"""All that a gateway and a process's own port expose, from one process of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import httpx

from services.gateway.models.encoding_pools import EncodingPools
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.metrics.redis import MemoryUse
from shared.messages import (
    DeviceHealth,
    DeviceMemory,
    DevicePeaks,
    GatewayLoad,
    HostedModel,
    HostLoad,
    IndexLoad,
    LinkLoad,
    SchedulerLoad,
    StoreLoad,
)
from shared.metrics.families.member import Member
from shared.metrics.machine import MachineCollector
from shared.metrics.metrics_server import MetricsServer
from shared.tls import TlsFiles
from tests.services.gateway.observability.metrics.test_gateway_metrics import timeline
from tests.services.gateway.peer import CARD
from tests.shared.metrics.test_families import heartbeat, worker_load
from tests.shared.metrics.test_role_demands import demand

LINK = LinkLoad(site="b", round_trip_s=0.1)


def fleet() -> list[Member]:
    load = worker_load(
        num_total_blocks=10,
        num_free_blocks=5,
        expert_imbalance=1.5,
        num_steps_by_tokens=(1,) * 14,
        device_health=DeviceHealth(num_xids=1),
        peaks=DevicePeaks(bytes_per_s=1.0, operations_per_s=1.0),
    )
    device = DeviceMemory(device="cpu", budget_bytes=2, used_bytes=1)
    hosted = HostedModel(name="m", revision="r", state="hot", device="cpu")
    loads = (
        heartbeat(
            "gateway-1",
            gateway=GatewayLoad(),
            store=StoreLoad(),
            links=(LINK,),
            num_refusals=(("gateway", 1),),
        ),
        heartbeat("scheduler-1", scheduler=SchedulerLoad(demands=(demand("m", 1, 1),))),
        heartbeat("kv_index-1", index=IndexLoad(state="exact")),
        heartbeat("host-1", host=HostLoad(devices=(device,), models=(hosted,))),
        *(heartbeat(f"{role}-1", load=load, model=CARD) for role in ("prefill", "decode")),
    )
    return [Member(each) for each in loads]


def gateway_metrics() -> GatewayMetrics:
    metrics = GatewayMetrics("gateway-1", "a")
    metrics.watch_fleet(fleet)
    metrics.watch_preparation(lambda: {"requests": EncodingPools()})
    metrics.watch_dropped_spans(lambda: 0)
    metrics.watch_redis(lambda: MemoryUse(0, 0))
    metrics.watch_certificate(lambda: 0.0)
    metrics.watch_machine(TlsFiles(), lambda: 0.0, folders=())
    metrics.count_ended("stop", model="m", dialect="openai", tenant="t", worker_id="decode-1")
    metrics.count_refused("overloaded", dialect="openai", tenant="t")
    metrics.count_tokens(model="m", tenant="t", prompt=1, cached=1, output=1, reasoning=1)
    metrics.count_resubmission("worker_lost")
    metrics.count_tool_calls(1)
    metrics.ttft_of("m").observe(0.1)
    metrics.itl_of("m").observe(0.1)
    metrics.observe_timeline(timeline())
    return metrics


def process_metrics() -> str:
    server = MetricsServer("127.0.0.1", 0, MachineCollector(TlsFiles()))
    server.start()
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        return httpx.get(url, trust_env=False).text
    finally:
        server.stop()


def names_of(exposition: str) -> Iterator[str]:
    for line in exposition.splitlines():
        if line and not line.startswith("#"):
            yield line.partition("{")[0].partition(" ")[0]
