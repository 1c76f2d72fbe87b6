"""Tool calls and reasoning over HTTP, with a response template of the operator."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from tests.services.gateway.conftest import PROCESSES, Cluster, SharedCluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT, events_of
from tests.support.services.model_dir import CHAT_TEMPLATE, write_model_dir

CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object"}},
}
PATCH = {"type": "custom", "custom": {"name": "patch"}}
CALLS = (
    '<think>hm</think>\n\nlook:<tool_call>{"name": "clock", "arguments": {"zone": "é"}}</tool_call>'
    '<tool_call>{"name": "patch", "arguments": {"input": "a\\n"}}</tool_call>'
)
CUT = '<tool_call>{"name": "clock", "arguments": {"zone": @@}}</tool_call>'

TOOL_NAMES = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def tools_cluster(
    shared_cluster: SharedCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """The shared peers with another gateway."""
    cluster = await shared_cluster.open()
    model_dir = tmp_path_factory.getbasetemp() / "tools" / "tiny"  # of all modules
    path = model_dir / "own.json"
    if not path.exists():
        write_model_dir(model_dir)
        (model_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE + TOOL_NAMES)
        path.write_text(json.dumps(TEMPLATE))
    PROCESSES.model_dirs.add(model_dir)
    async with cluster.beside(model_dir=model_dir, response_template=str(path)) as beside:
        yield replace(cluster, gateway=beside.gateway, http=beside.http)
    await cluster.reset()


TEMPLATE = {
    "fields": {
        "content": {},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"}
            },
        },
    }
}


def answers(cluster: Cluster, text: str) -> None:
    """Makes workers answer with the text, and forgets the requests of tests before."""
    cluster.scheduler.forget()
    for decode in cluster.decodes:
        decode.reset(cluster.files.tokenizer.encode([text]))


async def message_of(cluster: Cluster, **fields: Any) -> tuple[Any, Any]:
    body = {"tools": [CLOCK, PATCH], "max_tokens": 400, **fields}
    response = await cluster.http.post(CHAT, json={**BODY, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0], response.json()["usage"]


async def test_calls_of_a_whole_answer(tools_cluster: Cluster) -> None:
    answers(tools_cluster, CALLS)
    choice, usage = await message_of(tools_cluster)
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == ("look:", "hm")
    first, second = message["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"zone": "é"}
    assert second["custom"] == {"name": "patch", "input": "a\n"}
    assert first["id"].startswith("call_") and first["id"] != second["id"]
    assert choice["finish_reason"] == "tool_calls"
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


async def test_stream_is_the_whole_answer(tools_cluster: Cluster) -> None:
    answers(tools_cluster, CALLS)
    events = await events_of(tools_cluster, tools=[CLOCK, PATCH], max_tokens=400)
    choices = [each["choices"][0] for each in events[:-1] if each["choices"]]
    calls = [call for each in choices for call in each["delta"].get("tool_calls", ())]
    arguments = "".join(c["function"]["arguments"] for c in calls if "function" in c)
    assert json.loads(arguments) == {"zone": "é"}
    assert "".join(c["custom"]["input"] for c in calls if "custom" in c) == "a\n"
    assert "".join(each["delta"].get("content") or "" for each in choices) == "look:"
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["tool_calls"]


async def test_malformed_call(tools_cluster: Cluster) -> None:
    answers(tools_cluster, CUT)
    choice, _ = await message_of(tools_cluster)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": '{"zone": '}
    assert choice["message"]["content"] == "@@}}</tool_call>"
    assert choice["finish_reason"] == "stop"


async def test_tool_choice_none_calls_nothing(tools_cluster: Cluster) -> None:
    answers(tools_cluster, CALLS)
    choice, _ = await message_of(tools_cluster, tool_choice="none")
    assert "tool_calls" not in choice["message"]
    assert "<tool_call>" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


async def test_strict_tool_of_a_format_without_a_grammar_is_refused(tools_cluster: Cluster) -> None:
    function = {**CLOCK["function"], "strict": True}
    body = {**BODY, "tools": [CLOCK, {"type": "function", "function": {**function, "name": "n"}}]}
    response = await tools_cluster.http.post(CHAT, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools[1].function.strict")
    assert "cannot be constrained" in error["message"]
