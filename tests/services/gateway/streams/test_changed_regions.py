"""Open requests of a tenant whose regions change."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.streams.actions import Submit
from services.gateway.streams.changed_regions import ChangedRegions
from services.gateway.streams.queued_openings import Opening
from services.gateway.streams.streams import Streams
from services.gateway.tenancy.errors import NoRegionAllowed
from tests.services.gateway.streams.test_streams import (
    P1,
    P2,
    Recorder,
    Rig,
    abort,
    cancelling,
    request,
)

EU = ("de", "fr")


def running_in(*regions: str, region_class: str = "") -> Rig:
    """A request that a worker decodes, and that may be in these regions."""
    rig = Rig()
    rig.queue()
    rig.place()
    rig.tokens(0, 5)
    rig.stream.request = msgspec.structs.replace(
        rig.stream.request, allowed_regions=regions, region_class=region_class
    )
    rig.actions()
    return rig


@pytest.mark.parametrize(
    ("before", "after", "is_moved"),
    [
        ((), EU, True),
        (EU, ("fr",), True),
        (EU, ("us",), True),
        (("fr",), EU, False),
        (EU, (), False),
        ((), (), False),
    ],
)
def test_request_leaves_what_may_be_elsewhere(
    before: tuple[str, ...], after: tuple[str, ...], is_moved: bool
) -> None:
    rig = running_in(*before)
    rig.streams.change_regions(ChangedRegions("t", after), rig.now)
    actions = rig.actions()
    if not is_moved:
        assert actions == []
        assert rig.stream.request.allowed_regions == after
        return
    (published,), (submit,) = (
        [each for each in actions if not isinstance(each, Submit)],
        [each for each in actions if isinstance(each, Submit)],
    )
    assert (published.subject, published.message) == abort("w1", P1, "superseded")
    assert submit.message.request.allowed_regions == after
    assert submit.message.request.choices[0].output_token_ids != b""  # it goes on after its token
    assert rig.client.ends == []


def test_late_placement_in_the_regions_of_before_is_aborted() -> None:
    rig = Rig()
    rig.streams.change_regions(ChangedRegions("t", EU), rig.now)
    rig.actions()
    rig.place(P2, "w2", attempt=1)
    assert rig.published() == [abort("w2", P2, "superseded")]


@pytest.mark.parametrize(
    ("before", "after", "is_moved"),
    [("", "eu", True), ("us", "eu", True), ("eu", "eu", False), ("eu", "", False)],
)
def test_request_leaves_for_its_class(before: str, after: str, is_moved: bool) -> None:
    rig = running_in(region_class=before)
    rig.streams.change_regions(ChangedRegions("t", (), after), rig.now)
    assert any(isinstance(each, Submit) for each in rig.actions()) is is_moved
    assert rig.stream.request.region_class == after


def test_request_leaves_the_regions_of_a_class_that_its_tenant_has_no_more() -> None:
    rig = running_in("br", "us", region_class="americas")
    rig.streams.change_regions(ChangedRegions("t", ("us",)), rig.now)
    assert any(isinstance(each, Submit) for each in rig.actions())


def test_queued_request_leaves_its_scheduler() -> None:
    rig = Rig()
    rig.queue()
    rig.actions()
    rig.streams.change_regions(ChangedRegions("t", EU), rig.now)
    assert rig.published() == [cancelling("s1")]
    assert rig.stream.attempt == 2


def test_moves_for_regions_are_free() -> None:
    rig = running_in()
    for number in range(20):
        rig.streams.change_regions(ChangedRegions("t", (f"r{number}",)), rig.now)
    assert rig.client.ends == []
    assert rig.resubmission_causes() == ["regions_changed"] * 20


def test_request_ends_if_its_gateway_may_not_have_it() -> None:
    rig, error = running_in(), NoRegionAllowed("this gateway is elsewhere")
    rig.streams.change_regions(ChangedRegions("t", EU, error=error), rig.now)
    assert rig.client.error is error
    assert rig.published() == [abort("w1", P1, "failed")]
    late = Recorder()  # its tenant's record was read before the change
    rig.streams.open([Opening(request("r2"), late)], rig.now)
    assert late.error is error
    assert rig.actions() == []
    rig.streams.change_regions(ChangedRegions("t", EU), rig.now)  # it may again
    rig.streams.open([Opening(request("r3"), Recorder())], rig.now)
    assert rig.submit().request.allowed_regions == EU


def test_requests_that_wait_for_others_of_their_response_change_too() -> None:
    streams, clients = Streams("g", num_free=lambda: 1), [Recorder(), Recorder()]
    openings = [Opening(request(f"r{index}"), each) for index, each in enumerate(clients)]
    streams.open(openings, 0.0)
    streams.change_regions(ChangedRegions("t", EU), 0.0)
    streams.close("r0", "client_gone", NoRegionAllowed(""), 0.0)
    submitted = [each.message for each in streams.take_actions() if isinstance(each, Submit)]
    assert submitted[-1].request.allowed_regions == EU
    error = NoRegionAllowed("this gateway is elsewhere")
    streams.change_regions(ChangedRegions("t", error=error), 0.0)
    assert [len(each.ends) for each in clients] == [1, 1]


def test_requests_of_other_tenants_stay() -> None:
    rig = running_in()
    rig.streams.change_regions(ChangedRegions("t2", EU), rig.now)
    rig.streams.change_regions(ChangedRegions("t2", error=NoRegionAllowed("")), rig.now)
    assert rig.actions() == []
    assert rig.stream.request.allowed_regions == ()
