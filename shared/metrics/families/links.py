"""Families of links to other sites, as each gateway and scheduler sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.messages import LinkLoad
from shared.metrics.families.member import Member, Value

LABELS = ("process", "site")
VALUES = (
    Value("sent_bytes", "Bytes of messages sent there.", lambda link: link.sent_bytes, True),
    Value(
        "received_bytes", "Bytes of messages from there.", lambda link: link.received_bytes, True
    ),
    Value("states", "States that the site has sent.", lambda link: link.num_states, True),
    Value(
        "refused_states",
        "More of them than a site may send: they were dropped.",
        lambda link: link.num_refused_states,
        True,
    ),
    Value(
        "placed_requests",
        "Requests of this site that a scheduler placed there.",
        lambda link: link.num_placed,
        True,
    ),
    Value(
        "spilled_requests",
        "Of these, those that found no room here.",
        lambda link: link.num_spilled,
        True,
    ),
    Value(
        "moved_streams",
        "Streams that left the site before their end, as when the link is cut.",
        lambda link: link.num_moved,
        True,
    ),
    Value(
        "served_requests",
        "Requests of the site that a gateway took.",
        lambda link: link.num_served,
        True,
    ),
)


def link_families(members: Iterable[Member]) -> Iterator[Metric]:
    links = [(each.heartbeat.process_id, link) for each in members for link in each.heartbeat.links]
    up = GaugeMetricFamily(
        "hearth_link_up",
        "1: the states of a linked site arrive; 0: the link is cut.",
        labels=(*LABELS, "region"),
    )
    for process_id, link in links:
        up.add_metric([process_id, link.site, link.region], not link.is_cut)
    yield up
    yield _round_trips(links)
    for value in VALUES:
        family = CounterMetricFamily(f"hearth_link_{value.name}", value.text, labels=LABELS)
        for process_id, link in links:
            family.add_metric([process_id, link.site], value.of(link))
        yield family


def _round_trips(links: Iterable[tuple[str, LinkLoad]]) -> Metric:
    family = GaugeMetricFamily(
        "hearth_link_round_trip_seconds",
        "Mean round trip to the site.",
        labels=LABELS,
    )
    for process_id, link in links:
        if link.round_trip_s is not None:
            family.add_metric([process_id, link.site], link.round_trip_s)
    return family
