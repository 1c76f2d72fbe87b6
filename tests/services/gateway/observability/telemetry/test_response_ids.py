from __future__ import annotations

import pytest

from services.gateway.dialects.responses.ids import item_id, response_id
from services.gateway.observability.telemetry.response_ids import MAX_IDS, ResponseIds

REQUEST = "4f1c09d2a57be3180c6d9e21"


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-", "msg_", "rerank-", "score-"])
def test_id_that_ends_with_that_of_its_request(prefix: str) -> None:
    assert ResponseIds().request_id_of(prefix + REQUEST) == REQUEST


def test_id_of_a_response_and_of_its_items() -> None:
    ids, response = ResponseIds(), response_id(REQUEST)
    assert ids.request_id_of(response) == response
    ids.add(response, REQUEST)
    for name in (response, item_id("msg", response, 1), item_id("rs", response, 0, is_input=True)):
        assert ids.request_id_of(name) == REQUEST


def test_oldest_is_forgotten() -> None:
    ids = ResponseIds()
    for number in range(MAX_IDS + 1):
        ids.add(response_id(str(number)), str(number))
    assert ids.request_id_of(response_id("1")) == "1"
    assert ids.request_id_of(response_id("0")) == response_id("0")
