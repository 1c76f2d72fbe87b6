"""Tools and thinking over HTTP, with a response template of the operator."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.dialects.anthropic.tools import Tools, tool_options
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.anthropic.stream import MESSAGES, streamed, whole
from tests.services.gateway.dialects.anthropic.test_messages_http import BODY, COUNT, submitted
from tests.services.gateway.dialects.openai.test_tools_http import CALLS, answers, tools_cluster

__all__ = ["tools_cluster"]

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOLS: list[dict[str, Any]] = [
    {"name": "clock", "description": "tells the time", "input_schema": {"type": "object"}},
    {"type": "custom", "name": "patch", "input_schema": {"type": "object"}},
]
SERVER = {"type": "bash_20250124", "name": "bash"}


@pytest.mark.parametrize("send", [whole, streamed])
async def test_blocks_of_an_answer(tools_cluster: Cluster, send: Any) -> None:
    answers(tools_cluster, CALLS)
    body = {**BODY, "tools": [*TOOLS, SERVER], "max_tokens": 400}
    message = await send(tools_cluster.http, body)
    thinking, text, clock, patch = message["content"]
    assert (thinking["thinking"], len(thinking["signature"])) == ("hm", 44)
    assert text == {"type": "text", "text": "look:"}
    assert (clock["name"], clock["input"]) == ("clock", {"zone": "é"})
    assert (patch["name"], patch["input"]) == ("patch", {"input": "a\n"})
    assert clock["id"].startswith("toolu_") and clock["id"] != patch["id"]
    assert message["stop_reason"] == "tool_use"
    assert "bash_20250124" in message["hearth"]["warnings"][0]
    hidden = {"thinking": {"type": "adaptive", "display": "omitted"}}
    message = await send(tools_cluster.http, {**body, **hidden})
    assert message["content"][0]["type"] == "text"


async def test_next_turn_is_what_openai_sees(tools_cluster: Cluster) -> None:
    """Also thinking whose signature is foreign, results with errors, and their count."""
    answers(tools_cluster, CALLS)
    use = {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {"zone": "x"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": "no"}
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "T", "signature": "foreign"}, use],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    body = {**BODY, "tools": TOOLS, "messages": messages, "seed": 1}
    usage = (await whole(tools_cluster.http, body))["usage"]
    ours = await submitted(tools_cluster)
    count = (await tools_cluster.http.post(COUNT, json=body)).json()["input_tokens"]
    assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]
    function = {"name": "clock", "arguments": '{"zone":"x"}'}
    chat = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "T",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Error: no"},
        {"role": "user", "content": "and?"},
    ]
    tools = [
        {"type": "function", "function": {"name": each["name"], "parameters": {"type": "object"}}}
        for each in TOOLS
    ]
    fields = {"messages": chat, "tools": tools, "max_tokens": 9}
    await tools_cluster.http.post("/v1/chat/completions", json=fields)
    theirs = await submitted(tools_cluster)
    assert ours.prompt_token_ids == theirs.prompt_token_ids


async def test_choices(tools_cluster: Cluster) -> None:
    answers(tools_cluster, CALLS)
    body = {**BODY, "tools": TOOLS, "max_tokens": 400}
    none = await whole(tools_cluster.http, {**body, "tool_choice": {"type": "none"}})
    assert none["stop_reason"] == "end_turn" and "<tool_call>" in none["content"][-1]["text"]
    strict = {**body, "tools": [{**TOOLS[0], "strict": True}]}
    response = await tools_cluster.http.post(MESSAGES, json=strict)
    assert "tools[0]" in response.json()["error"]["message"]


async def test_errors_name_the_field_of_a_schema() -> None:
    options = tool_options(msgspec.convert([SERVER, *TOOLS], Tools), None)
    assert options is not None
    places = [each.schema_param for each in options.tools]
    assert places == ["tools[1].input_schema", "tools[2].input_schema"]
