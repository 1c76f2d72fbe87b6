"""Two turns in the shape of Codex: in each a call and its result, and the cache in between; with a
model that calls at once, and with a gpt-oss, which thinks before it calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.clients.agents.codex import HEADERS, body_of, first_items, message, next_items
from tests.support.account import AGENT_MODEL, AGENTS, HARMONY, HARMONY_MODEL, Account

LEAST_CACHED = 0.95
CALL = ["function_call"]


@pytest.fixture
def client(request: pytest.FixtureRequest, accounts: dict[str, Account]) -> Iterator[openai.OpenAI]:
    account = accounts[request.param]
    address = {"base_url": f"{account.url}/v1", "api_key": account.token}
    with openai.OpenAI(**address, max_retries=0) as client:
        yield client


def send(client: openai.OpenAI, items: list[dict[str, Any]], model: str) -> Response:
    body = body_of(items, model)
    own = {"client_metadata": body.pop("client_metadata")}
    *_, last = client.responses.create(**body, extra_headers=HEADERS, extra_body=own)
    assert last.type == "response.completed"
    return last.response


def output_of(response: Response) -> list[dict[str, Any]]:
    return [each.to_dict() for each in response.output]


def check_cached(response: Response) -> None:
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens_details.cached_tokens >= LEAST_CACHED * usage.input_tokens, usage


@pytest.mark.parametrize(
    ("client", "model", "kinds"),
    [(AGENTS, AGENT_MODEL, CALL), (HARMONY, HARMONY_MODEL, ["reasoning", *CALL])],
    indirect=["client"],
)
def test_later_requests_are_cached(client: openai.OpenAI, model: str, kinds: list[str]) -> None:
    items = first_items("List the files.")
    called = send(client, items, model)
    assert [each.type for each in called.output] == kinds
    items = next_items(items, output_of(called), "README.md")
    answered = send(client, items, model)
    assert answered.output_text == "The tool has answered."
    check_cached(answered)
    items = [*items, *output_of(answered), message("msg_9", "user", "List them again.")]
    again = send(client, items, model)
    assert [each.type for each in again.output] == kinds
    check_cached(again)
