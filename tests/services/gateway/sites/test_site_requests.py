"""Requests of other sites, as this gateway takes them."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.sites.site_requests import MAX_CHOICES, check_request, site_request
from shared.errors import InvalidRequest, WorkerBusy
from shared.messages import Choice, Request, StartDecode
from tests.services.scheduler.literals import submit_of
from tests.support.records import model_card

CARD = model_card(max_context_tokens=20)


def request(**fields: object) -> Request:
    made = submit_of("r" * 256, gateway_id="b/gw", num_prompt_tokens=20).request
    return msgspec.structs.replace(made, **fields)


def test_placements_of_one_request_are_different_requests_here() -> None:
    """The ids of a peer are random only if it wants so."""
    orders = [StartDecode(placement_id=b"p" * 15 + end, request=request()) for end in (b"1", b"2")]
    made = [site_request(each, "gw", b"k" * 32) for each in orders]
    assert len({each.request_id for each in made}) == 2
    assert {len(each.request_id) for each in made} == {256}


def test_what_this_site_could_not_serve_is_refused() -> None:
    check_request(request(), [model_card(name="other"), CARD])
    for unserved in ({"model": "other"}, {"revision": "r2"}, {"block_size": 1}):
        with pytest.raises(WorkerBusy, match="no worker of this site serves"):
            check_request(request(**unserved), [CARD])
    with pytest.raises(WorkerBusy, match="no worker of this site has a context"):
        check_request(request(prompt_token_ids=bytes(84)), [CARD])


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": bytes(5)},
        {"choices": ()},
        {"choices": (Choice(choice_index=0),) * (MAX_CHOICES + 1)},
        {"choices": (Choice(choice_index=0, output_token_ids=bytes(3)),)},
    ],
)
def test_what_no_gateway_sends_is_invalid(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        check_request(request(**fields), [CARD])
