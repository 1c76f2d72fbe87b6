"""All families that heartbeats make: of a whole fleet in a gateway, of itself in any process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.metrics.families.failed_operations import FailedOperations
from shared.metrics.families.links import link_families
from shared.metrics.families.member import Member
from shared.metrics.families.role_demands import role_demands
from shared.metrics.families.services import service_families
from shared.metrics.families.worker import worker_families


class FleetCollector(Collector):
    def __init__(
        self,
        members: Callable[[], Iterable[Member]],
        failed: Callable[[], Mapping[str, FailedOperations]] = dict,
    ) -> None:
        """Collects metrics of the fleet. `failed` has the failures of workers that have stopped, by
        worker id.
        """
        self._members = members
        self._failed = failed

    def collect(self) -> Iterator[Metric]:
        members = tuple(self._members())
        yield from process_families(members)
        yield from worker_families(members, self._failed())
        yield from service_families(members)
        yield from link_families(members)
        yield from role_demands(each.heartbeat for each in members if each.is_live)


def process_families(members: Iterable[Member]) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "hearth_process_info",
        "1, with a process's release.",
        labels=["process", "release", "region"],
    )
    live = GaugeMetricFamily(
        "hearth_process_live",
        "1: heartbeats and steps come in time; 0: lost, frozen, or hanging.",
        labels=["process", "role"],
    )
    ready = GaugeMetricFamily(
        "hearth_process_ready", "1: live, and takes work.", labels=["process", "role"]
    )
    draining = GaugeMetricFamily(
        "hearth_process_draining",
        "1: takes no work, and ends what it has; then it stops, or `hearth drain` is undone.",
        labels=["process", "role"],
    )
    uptime = GaugeMetricFamily(
        "hearth_process_uptime_seconds", "Since a process's start.", labels=["process"]
    )
    mismatches = CounterMetricFamily(
        "hearth_impostor_messages",
        "Messages that a process rejected because the stated sender had not sent them.",
        labels=["process"],
    )
    reconnects = CounterMetricFamily(
        "hearth_nats_reconnects",
        "Times a process lost its connection to NATS.",
        labels=["process"],
    )
    failed_items = CounterMetricFamily(
        "hearth_failed_items",
        "Requests, records, peers and replies whose handling raised in a process: bugs.",
        labels=["process"],
    )
    refusals = CounterMetricFamily(
        "hearth_residency_refusals",
        "Refusals to have data of a tenant outside of its regions, by what refused.",
        labels=["process", "check"],
    )
    for heartbeat, is_live in members:
        process_id = heartbeat.process_id
        info.add_metric([process_id, heartbeat.release, heartbeat.region], 1)
        for role in heartbeat.roles:
            live.add_metric([process_id, role], is_live)
            ready.add_metric([process_id, role], is_live and heartbeat.state == "ready")
            draining.add_metric([process_id, role], heartbeat.state == "draining")
        uptime.add_metric([process_id], heartbeat.uptime_s)
        mismatches.add_metric([process_id], heartbeat.num_impostors)
        reconnects.add_metric([process_id], heartbeat.num_bus_reconnects)
        failed_items.add_metric([process_id], heartbeat.num_failed_items)
        for check, count in heartbeat.num_refusals:
            refusals.add_metric([process_id, check], count)
    yield from (
        *(info, live, ready, draining, uptime),
        *(mismatches, reconnects, failed_items, refusals),
    )
