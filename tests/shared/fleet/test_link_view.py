"""The links of a site, summed over its processes."""

from __future__ import annotations

from typing import Any

from shared.fleet.fleet_view import FleetView
from shared.fleet.tenant_views import TenantSite
from shared.messages import (
    GatewayLoad,
    Heartbeat,
    LinkLoad,
    SitePushes,
    SiteRequests,
    WorkerLoad,
)

B = LinkLoad(site="b", region="us", changed_s=30.0, num_placed=1)


def beat(process_id: str, number: int, *links: LinkLoad, **fields: Any) -> Heartbeat:
    fields = {"roles": ("gateway",), "state": "ready", "epoch": 1} | fields
    return Heartbeat(
        process_id=process_id, sequence_number=number, interval_s=0.25, links=links, **fields
    )


def test_counts_and_speeds_are_sums_and_one_cut_is_a_cut() -> None:
    view = FleetView()
    for number, now in ((1, 0.0), (2, 2.0)):
        link = LinkLoad(
            site="b", region="us", changed_s=9.0, sent_bytes=1000 * number, num_placed=number,
            round_trip_s=0.05,
        )  # fmt: skip
        view.observe(beat("gateway-1", number, link), now)
        view.observe(beat("gateway-2", number, B, epoch=2), now)
    first, second = view.links({"b": ["m"]}), view.links()
    assert (first[0].models, second[0].models) == (("m",), ())
    (link,) = second
    assert (link.sent_per_s, link.num_placed, link.round_trip_s) == (500.0, 3, 0.05)
    assert (link.is_cut, link.for_s, link.loss) == (False, 30, "")
    cut = LinkLoad(site="b", is_cut=True, changed_s=12.4)
    view.observe(beat("gateway-2", 3, cut, epoch=2), 2.2)
    (link,) = view.links()
    assert link.loss == "link to site b: cut for 12 s"
    refused = LinkLoad(site="b", is_cut=True, changed_s=13.0, problem="it has two names")
    view.observe(beat("gateway-2", 4, refused, epoch=2), 2.4)
    (link,) = view.links()
    assert link.loss == "link to site b: cut for 13 s: it has two names"


def test_kv_of_a_link_is_what_workers_have_received() -> None:
    view, card = FleetView(), LinkLoad(site="b", kv_bytes_per_s=4000.0)
    for number, now in ((1, 0.0), (2, 2.0)):
        pushes = (SitePushes("b", 1, 4000 * number, 1.0),)
        load = WorkerLoad(step=number, step_budget_s=1.0, site_pushes=pushes)
        for name in ("decode-1", "decode-2"):
            view.observe(beat(name, number, roles=("decode",), load=load), now)
    view.observe(beat("scheduler-1", 1, card, roles=("scheduler",)), 2.0)
    (link,) = view.links()
    assert (link.kv_per_s, link.kv_limit_per_s) == (4000, 4000.0)


def test_a_process_that_is_gone_has_no_links() -> None:
    view = FleetView()
    view.observe(beat("gateway-1", 1, B), 0.0)
    view.observe(beat("gateway-2", 1, LinkLoad(site="c")), 0.0)
    view.observe(beat("gateway-2", 2, state="stopped"), 0.1)
    assert [each.site for each in view.links()] == ["b"]
    view.observe(beat("gateway-1", 2, epoch=5), 0.2)
    assert view.links() == [], "its next process has none yet"


def test_requests_of_tenants_are_summed_by_site() -> None:
    view = FleetView()
    for name in ("gateway-1", "gateway-2"):
        load = GatewayLoad(
            site_requests=(SiteRequests("a", "t", 1), SiteRequests("b", "t", 4, "us")),
        )
        view.observe(beat(name, 1, gateway=load), 0.0)
    assert view.tenant_sites() == [
        TenantSite(tenant_id="t", site="b", region="us", num_requests=8),
        TenantSite(tenant_id="t", site="a", num_requests=2),
    ]
