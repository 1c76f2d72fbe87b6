"""Families of schedulers, indices, gateways and hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from shared.metrics.families.member import Member, Value, families

SCHEDULER_VALUES = (
    Value(
        "queued_requests", "Requests queued or being placed.", lambda load: load.num_queued_requests
    ),
    Value("oldest_wait_seconds", "Wait of the oldest of them.", lambda load: load.oldest_wait_s),
)
# An index is exact if its state of every worker matches the events of that worker.
INDEX_VALUES = (
    Value("exact", "1: exact; 0: degraded.", lambda load: load.state == "exact"),
    Value("blocks", "Known blocks.", lambda load: load.num_blocks),
    Value("inexact_workers", "Workers that are not exact.", lambda load: load.num_inexact_workers),
    Value("resyncs", "Requests for a worker's full state.", lambda load: load.num_resyncs, True),
    Value(
        "pending_records",
        "Changes of prefix records that are not in Redis yet.",
        lambda load: load.num_pending_records,
    ),
    Value("pinned_prefixes", "Prefixes pinned now.", lambda load: load.num_pinned_prefixes),
)
GATEWAY_VALUES = (
    Value("open_streams", "Requests open now.", lambda load: load.num_open_streams),
    Value(
        "resubmissions",
        "Times a request was resubmitted after its scheduler or worker was lost.",
        lambda load: load.num_resubmissions,
        True,
    ),
    Value(
        "lost_streams",
        "Requests that ended in an error after their first token.",
        lambda load: load.num_lost_streams,
        True,
    ),
    Value(
        "refused_requests",
        "Requests rejected before they were submitted.",
        lambda load: load.num_refused_requests,
        True,
    ),
    Value(
        "numerics_changes",
        "Times an output was continued by a worker with other numerics than before.",
        lambda load: load.num_numerics_changes,
        True,
    ),
    Value(
        "unlike_prefills",
        "Prompts that decode computed because it may not use the KV of live prefill workers.",
        lambda load: load.num_unlike_prefills,
        True,
    ),
)


REDIS_VALUES = (
    Value(
        "breaker_open",
        "1: the last call to Redis got no reply; calls fail at once, but for one every 0.5 s.",
        lambda load: load.is_away,
    ),
    Value(
        "rejects_writes",
        "1: Redis has rejected a write in the last 30 s: its disk or memory is full.",
        lambda load: load.rejects_writes,
    ),
    Value("failures", "Calls that got no reply in time.", lambda load: load.num_failures, True),
    Value("reconnects", "First replies after a failure.", lambda load: load.num_reconnects, True),
)


def service_families(members: Iterable[Member]) -> Iterator[Metric]:
    heartbeats = [each.heartbeat for each in members]
    schedulers = [(each.process_id, each.scheduler) for each in heartbeats if each.scheduler]
    indices = [(each.process_id, each.index) for each in heartbeats if each.index]
    gateways = [(each.process_id, each.gateway) for each in heartbeats if each.gateway]
    stores = [(each.process_id, each.store) for each in heartbeats if each.store]
    yield from families(SCHEDULER_VALUES, "hearth_scheduler", "scheduler", schedulers)
    yield from families(INDEX_VALUES, "hearth_kv_index", "process", indices)
    yield from families(GATEWAY_VALUES, "hearth_gateway", "gateway", gateways)
    yield from families(REDIS_VALUES, "hearth_redis", "process", stores)
    yield from _hosts(members)


def _hosts(members: Iterable[Member]) -> Iterator[Metric]:
    budget = _by_device("memory_budget_bytes", "Memory that models on a device may use.")
    used = _by_device("memory_used_bytes", "Memory of it that is used.")
    models = GaugeMetricFamily(
        "hearth_host_models", "Models of a host, by state.", labels=["host", "state"]
    )
    for member in members:
        process_id, host = member.heartbeat.process_id, member.heartbeat.host
        if host is None:
            continue
        for device in host.devices:
            budget.add_metric([process_id, device.device], device.budget_bytes)
            used.add_metric([process_id, device.device], device.used_bytes)
        for state, count in Counter(each.state for each in host.models).items():
            models.add_metric([process_id, state], count)
    yield from (budget, used, models)


def _by_device(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"hearth_host_{name}", text, labels=["host", "device"])
