"""The kinds of requests that real clients were refused or misread with, each through its route."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from shared.packing import unpack_token_ids
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_chat_http import CHAT
from tests.services.gateway.dialects.openai.test_tools_http import answers, tools_cluster

__all__ = ["tools_cluster"]

pytestmark = pytest.mark.asyncio(loop_scope="session")

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
RUN = "/client/v4/accounts/tenant-1/ai/run/tiny"
HELLO = {"role": "user", "content": "hello"}
LIGHT: dict[str, Any] = {"type": "function", "name": "lamp", "parameters": {"type": "object"}}
SWITCH = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}


@dataclass(frozen=True)
class Met:
    """A request. `said` is in the prompt or, of a rejection, the parameter that is named."""

    path: str
    body: dict[str, Any]
    said: str
    status: int = 200


def called(arguments: str) -> Met:
    """A call that a model wrote, and the client's complaint about it, in chat completions."""
    function = {"name": "lamp", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    calling = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "c1", "content": "unreadable"}
    return Met(CHAT, {"messages": [HELLO, calling, result]}, "unreadable")


def item_call(arguments: str, *, call_id: str = "c1", output: str) -> list[dict[str, Any]]:
    call = {"type": "function_call", "call_id": call_id, "name": "lamp", "arguments": arguments}
    return [call, {"type": "function_call_output", "call_id": call_id, "output": output}]


def items(*found: dict[str, Any], said: str = "hello") -> Met:
    return Met(RESPONSES, {"input": [HELLO, *found]}, said)


def blocks(role: str, *found: dict[str, Any], said: str) -> Met:
    messages = [HELLO, {"role": role, "content": [*found]}, {"role": "user", "content": "then"}]
    return Met(MESSAGES, {"messages": messages, "max_tokens": 8}, said)


def chat(said: str = "hello", status: int = 200, **fields: Any) -> Met:
    return Met(CHAT, {"messages": [HELLO], **fields}, said, status)


SEARCHED = {"type": "server_tool_use", "id": "srvtoolu_9", "name": "web_search", "input": {}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_9", "content": []}
PAGE = {
    "type": "search_result",
    "source": "https://example.net/page",
    "title": "page",
    "content": [{"type": "text", "text": "quick fact"}],
}
WRAPPED = {"name": "s", "title": "S", "strict": True, "schema": SWITCH}
MET = {
    "arguments cut": called('{"room": "ki'),
    "arguments a list": called('["kitchen"]'),
    "arguments cut, an item": items(*item_call('{"room": "ki', output="dark"), said="dark"),
    "arguments a list, an item": items(*item_call('["kitchen"]', output="dark"), said="dark"),
    "tools as an item": items({"type": "additional_tools", "tools": [LIGHT]}, said="lamp"),
    "tool search in the history": items(
        {"type": "tool_search_call", "call_id": "s1", "arguments": {"query": "lamp"}},
        {"type": "tool_search_output", "call_id": "s1", "status": "completed", "tools": []},
    ),
    "web search in the history": items(
        {"type": "web_search_call", "id": "w1", "status": "completed", "action": {"type": "search"}}
    ),
    "a call id of two rounds": items(
        *item_call("{}", output="dark"), *item_call("{}", output="bright"), said="bright"
    ),
    "unknown key beside a schema": chat(
        "response_format.json_schema.title",
        400,
        response_format={"type": "json_schema", "json_schema": WRAPPED},
    ),
    "refusal part": Met(
        CHAT,
        {
            "messages": [
                HELLO,
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "not today"}]},
                HELLO,
            ]
        },
        "not today",
    ),
    "search result": blocks("user", PAGE, said="quick fact"),
    "server's tool in the history": blocks(
        "assistant", SEARCHED, FOUND, {"type": "text", "text": "as found"}, said="as found"
    ),
    "thinking without effect": chat("thinking", 400, thinking={"type": "disabled"}),
    "enable_thinking at the top": chat("enable_thinking", 400, enable_thinking=False),
    "verbosity's default": chat(verbosity="medium"),
}


@pytest.mark.parametrize("kind", MET)
async def test_met_request_is_understood(tools_cluster: Cluster, kind: str) -> None:
    met, cluster = MET[kind], tools_cluster
    response = await cluster.http.post(met.path, json={"model": "tiny", **met.body})
    assert response.status_code == met.status, response.text
    if met.status == 400:
        assert response.json()["error"]["param"] == met.said
        return
    request = (await cluster.scheduler.submits.get()).request
    prompt = cluster.files.tokens.decode(tuple(unpack_token_ids(request.prompt_token_ids)))
    assert met.said in prompt


async def test_times_of_a_response_are_whole_numbers(tools_cluster: Cluster) -> None:
    """Clients with types fail on a decimal point."""
    for is_streamed in (False, True):
        body = {"model": "tiny", "input": "hello", "stream": is_streamed}
        text = (await tools_cluster.http.post(RESPONSES, json=body)).text
        times = re.findall(r'"(?:created|completed)_at":([^,}]+)', text)
        assert times and all(each == "null" or each.isdigit() for each in times)


async def test_json_is_an_object_as_at_cloudflare(tools_cluster: Cluster) -> None:
    answers(tools_cluster, '{"on":true}')
    response_format = {"type": "json_schema", "json_schema": SWITCH}
    body = {"messages": [HELLO], "response_format": response_format}
    found = (await tools_cluster.http.post(RUN, json=body)).json()
    assert found["result"]["response"] == {"on": True}
