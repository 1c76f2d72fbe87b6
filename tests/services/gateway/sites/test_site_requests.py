"""Requests of other sites, as this gateway takes them."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.sites.prefill_requests import check_prefill
from services.gateway.sites.site_requests import (
    MAX_CHOICES,
    may_retain_class,
    narrowed,
    site_request,
)
from services.scheduler.backlog import QueueKey
from shared.errors import InvalidRequest, WorkerBusy
from shared.messages import Choice, Heartbeat, ModelCard, Request
from shared.regions.region_classes import region_classes
from tests.services.scheduler.literals import submit_of
from tests.support.records import model_card
from tests.support.world.site_prefills import run_prefill_of_site

CARD = model_card(max_context_tokens=20, features=("f/1",))


def worker(card: ModelCard) -> Heartbeat:
    return Heartbeat(
        process_id="d", epoch=1, sequence_number=1, roles=("decode",), state="ready",
        interval_s=0.25, region="eu", model=card,
    )  # fmt: skip


def request(**fields: object) -> Request:
    made = submit_of("r" * 256, gateway_id="b/gw", num_prompt_tokens=20).request
    return msgspec.structs.replace(made, **fields)


def test_placements_of_one_request_are_different_requests_here() -> None:
    """The ids of a peer are random only if it wants so."""
    made = [site_request(request(), b"p" * 15 + end, "gw", b"k" * 32) for end in (b"1", b"2")]
    assert len({each.request_id for each in made}) == 2
    assert {len(each.request_id) for each in made} == {256}


def test_what_this_site_could_not_serve_is_refused() -> None:
    workers = [worker(model_card(name="other")), worker(CARD)]
    assert narrowed(request(), workers, ("eu",)) == request()
    for unserved in ({"model": "third"}, {"revision": "r2"}, {"block_size": 1}):
        with pytest.raises(WorkerBusy, match="no worker of this site serves"):
            narrowed(request(**unserved), workers, ("eu",))
    for unserved, reason in (
        ({"prompt_token_ids": bytes(84)}, "no worker of this site has a context"),
        ({"allowed_regions": ("us",)}, "is in the allowed regions"),
        ({"needs": ("f/1", "x/9")}, "no worker of this site has f/1, x/9"),
    ):
        with pytest.raises(WorkerBusy, match=reason):
            narrowed(request(**unserved), workers, ("eu",))


def test_names_that_a_terminal_would_obey_are_refused() -> None:
    for named in ({"tenant_id": "t\x1b[2J"}, {"request_id": "r\n"}):
        with pytest.raises(InvalidRequest, match="must be printable"):
            narrowed(request(**named), [worker(CARD)], ("eu",))
        with pytest.raises(InvalidRequest, match="must be printable"):
            check_prefill(msgspec.structs.replace(run_prefill_of_site("b"), **named), ())


def test_conditions_that_make_no_difference_here_make_no_queue() -> None:
    """Each queue has a turn: a site must not have one for each of its requests."""
    other = msgspec.structs.replace(CARD.numerics, device="another")
    keys = {
        QueueKey.of(narrowed(request(**fields), [worker(CARD)], ("eu",)))
        for fields in (
            {"allowed_regions": ("eu", "us"), "needs": ("f/1",), "numerics": other},
            {"allowed_regions": ("x", "eu"), "needs": ("f/1", "f/1")},
        )
    }
    assert len(keys) == 1
    kept = narrowed(request(numerics=CARD.numerics), [worker(CARD)], ("eu",))
    assert kept.numerics == CARD.numerics


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": bytes(5)},
        {"choices": ()},
        {"choices": (Choice(choice_index=0),) * 2},
        {"choices": (Choice(choice_index=0),) * (MAX_CHOICES + 1)},
        {"choices": (Choice(choice_index=0, output_token_ids=bytes(3)),)},
    ],
)
def test_what_no_gateway_sends_is_invalid(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        narrowed(request(**fields), [worker(CARD)], ("eu",))


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [({}, True), ({"allowed_regions": ("eu",)}, False), ({"region_class": "europe"}, False)],
)
def test_nothing_is_retained_of_a_tenant_that_is_bound_to_regions(
    fields: dict[str, object], is_kept: bool
) -> None:
    made = site_request(request(**fields), b"p" * 16, "gw", b"k" * 32)
    assert made.is_zero_retention is not is_kept


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({"region_class": "europe", "allowed_regions": ("eu",)}, True),
        ({"allowed_regions": ("eu",)}, False),
        ({"region_class": "europe", "is_zero_retention": True}, False),
        ({"region_class": "europe", "tenant_id": "c/of-a-third-site"}, False),
        ({"tenant_id": "c/of-a-third-site"}, False),
    ],
)
def test_kv_of_a_region_class_stays_where_its_withdrawal_would_arrive(
    fields: dict[str, object], is_kept: bool
) -> None:
    made = site_request(request(**fields), b"p" * 16, "gw", b"k" * 32, retains_class=True)
    assert made.is_zero_retention is not is_kept


@pytest.mark.parametrize(
    ("region_class", "allowed_regions", "index_regions", "may_stay"),
    [
        ("eu", ("fr", "de"), ("de",), True),
        ("eu", ("de",), ("de", "us"), True),
        ("eu", ("fr", "de"), (), False),
        ("eu", ("fr", "de"), ("us",), False),
        ("eu", ("de",), ("de", "fr"), False),
        ("", ("de",), ("de",), False),
        ("", (), ("de",), False),
        ("other", ("de",), ("de",), False),
    ],
)
def test_kv_of_a_region_class_stays_where_an_index_may_follow_it(
    region_class: str,
    allowed_regions: tuple[str, ...],
    index_regions: tuple[str, ...],
    may_stay: bool,
) -> None:
    classes = region_classes(["eu=fr,de"])
    asked = request(region_class=region_class, allowed_regions=allowed_regions)
    assert may_retain_class(asked, classes, index_regions) is may_stay


def test_this_site_decides_priority_and_weight_of_the_requests_of_others() -> None:
    for asked, priority in ((4, 0), (-2, -2)):
        given = request(priority=asked, weight=1000.0)
        made = site_request(given, b"p" * 16, "gw", b"k" * 32, weight=0.5)
        assert (made.priority, made.weight, made.queue_id) == (priority, 0.5, "b/")
