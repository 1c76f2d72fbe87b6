"""Every rejection below /v1/messages is in Anthropic's envelope, with its type and status."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.gateway.dialects.anthropic.errors import envelope, type_of
from services.gateway.request.generation_request import prompt_too_long
from services.gateway.tenancy.errors import ModelNotAllowed, RequestsExhausted
from shared.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    DependencyUnavailable,
    HearthError,
    NoCapacity,
    Overloaded,
    PayloadTooLarge,
    PromptTooLong,
    UnknownModel,
)
from shared.messages import Failure, Finish, Served
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.anthropic.stream import MESSAGES, events_of
from tests.services.gateway.dialects.anthropic.test_messages_http import BODY
from tests.services.gateway.tenancy.test_limits_http import Acme, acme
from tests.support.grids import in_one_test

__all__ = ["acme"]

USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "r"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "x", "data": "AA"}}


def check_rejected(response: httpx.Response, status: int, kind: str, part: str = "") -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert list(body) == ["type", "error", "request_id"]
    assert (body["type"], list(body["error"])) == ("error", ["type", "message"])
    assert body["error"]["type"] == kind, body
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert part in body["error"]["message"], body


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


HI = {"role": "user", "content": "hi"}
AT = "messages[0].content[0]"


@in_one_test(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [user({"type": "video"})]}, "messages[0].content"),
        ({"messages": [user(PNG)]}, AT),
        ({"messages": [user(PDF)]}, f"{AT}.source"),
        ({"messages": [user(USE)]}, f"{AT}.type"),
        ({"messages": [assistant(RESULT), HI]}, f"{AT}.type"),
        ({"messages": [user({"type": "thinking", "thinking": "x"})]}, f"{AT}.type"),
        ({"messages": [user(RESULT)]}, "'toolu_1'"),
        ({"messages": [user(RESULT)]}, f"{AT}.tool_use_id"),
        ({"messages": [HI, assistant(USE, USE), HI]}, "messages[1].content[1].id"),
        (
            {"messages": [HI, assistant(USE), user({**RESULT, "content": [PNG]})]},
            "messages[2].content[0].content[0]",
        ),
        ({"messages": [HI, {"role": "assistant", "content": "I"}]}, "messages[1].role"),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice",
        ),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"temperature": 2.1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"stop": ["x"]}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_bad_field_is_named(cluster: Cluster, fields: dict[str, Any], field: str) -> None:
    body = {name: value for name, value in {**BODY, **fields}.items() if value is not None}
    for is_stream in (False, True):
        response = await cluster.http.post(MESSAGES, json={**body, "stream": is_stream})
        check_rejected(response, 400, "invalid_request_error", field)
    assert cluster.scheduler.submits.empty()


async def test_what_is_not_there(cluster: Cluster) -> None:
    for path in ("batches", "x/y"):
        check_rejected(await cluster.http.get(f"{MESSAGES}/{path}"), 404, "not_found_error")
    wrong = await cluster.http.get(MESSAGES)
    check_rejected(wrong, 405, "invalid_request_error")
    assert "POST" in wrong.headers["allow"]
    other = await cluster.http.get("/v1/messagesx")
    assert other.json()["error"]["code"] == "not_found"


async def test_too_large(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "x y " * 400}]
    long = await cluster.http.post(MESSAGES, json={**BODY, "messages": messages})
    check_rejected(long, 400, "invalid_request_error", "prompt is too long: ")
    assert " tokens > 512 maximum" in long.json()["error"]["message"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            prompt_too_long("messages", "600 tokens", 512).message,
            "prompt is too long: 600 tokens > 512 maximum",
        ),
        (
            prompt_too_long("messages", "at least 600 tokens", 512).message,
            "prompt is too long: 600 tokens > 512 maximum",
        ),
        (
            prompt_too_long("messages", "512 tokens, and an answer has one", 512).message,
            "prompt is too long: 512 tokens > 511 maximum",
        ),
        ("the request takes 9 bytes", "prompt is too long: the request takes 9 bytes"),
    ],
)
def test_prompt_too_long_has_the_numbers_that_clients_read(message: str, expected: str) -> None:
    body = envelope(PromptTooLong(message, param="messages"), "r")
    assert body.error.message == expected


@in_one_test(
    ("error", "status", "kind"),
    [
        (Overloaded("full", retry_after_s=3), 529, "overloaded_error"),
        (NoCapacity("no worker"), 503, "api_error"),
        (DependencyUnavailable("Redis"), 503, "api_error"),
        (DeadlineExceeded("late"), 504, "timeout_error"),
        (HearthError("broken"), 500, "api_error"),
        (AuthenticationFailed("key"), 401, "authentication_error"),
        (ModelNotAllowed("model"), 403, "permission_error"),
        (UnknownModel("model"), 404, "not_found_error"),
        (PayloadTooLarge("body"), 413, "request_too_large"),
        (RequestsExhausted("rate", retry_after_s=1, headers={}), 429, "rate_limit_error"),
    ],
)
def test_types_of_errors(error: HearthError, status: int, kind: str) -> None:
    assert (type_of(error).status, type_of(error).name) == (status, kind)


async def test_failure_in_mid_stream_is_an_event(cluster: Cluster) -> None:
    failure = Failure(code="internal_error", message="the device is gone")
    served = Served(num_cached_tokens=0, prefill_worker_id=None)
    decode = cluster.decodes[0]
    decode.finish = Finish(reason="failed", served=served, failure=failure)
    decode.answer = decode.answer[:6]
    whole = await cluster.http.post(MESSAGES, json=BODY)
    check_rejected(whole, 500, "api_error", "the device is gone")
    response = await cluster.http.post(MESSAGES, json={**BODY, "stream": True})
    events = events_of(response.content)
    assert events[0]["type"] == "message_start"
    assert events[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "the device is gone"},
        "request_id": response.headers["request-id"],
    }


async def test_max_tokens_alone_do_not_exceed_a_limit(acme: Acme) -> None:
    await acme.configure(output_tokens_per_min=50)
    assert (await acme.http.post(MESSAGES, json={**BODY, "max_tokens": 32_000})).status_code == 200
