"""`/v1/messages` over HTTP: a running gateway, real servers, simulated peers on the bus."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from services.gateway.dialects.anthropic.request import COUNT_FIELDS, request_of
from services.gateway.request import prepared_bodies
from services.gateway.request.prompt import ChatPrompt
from shared.messages import Request
from shared.packing import unpack_token_ids
from tests.services.gateway.conftest import ANSWER, API_KEY, Cluster
from tests.services.gateway.dialects.anthropic.stream import (
    MESSAGES,
    events_of,
    message_of,
    streamed,
    whole,
)

COUNT = f"{MESSAGES}/count_tokens"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "hi, what is a block hash?"}],
}


async def submitted(cluster: Cluster) -> Request:
    return (await cluster.scheduler.submits.get()).request


async def prompt_of(cluster: Cluster, **fields: Any) -> str:
    """What the template makes of a body."""
    await whole(cluster.http, {**BODY, **fields})
    request = await submitted(cluster)
    return cluster.files.tokens.decode(unpack_token_ids(request.prompt_token_ids))


@pytest.mark.parametrize("inline_bytes", [prepared_bodies.MAX_INLINE_BYTES, 1])
async def test_message_and_its_stream(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", inline_bytes)
    message = await whole(cluster.http, BODY)
    request = await submitted(cluster)
    num_prompt = len(unpack_token_ids(request.prompt_token_ids))
    assert message == {
        "id": f"msg_{request.request_id}",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": len(cluster.answer),
        },
    }
    other = await streamed(cluster.http, BODY)
    assert other["id"] != message["id"]
    assert {**other, "id": message["id"]} == message


async def test_usage_is_known_at_the_start(cluster: Cluster) -> None:
    response = await cluster.http.post(f"{MESSAGES}?beta=true", json={**BODY, "stream": True})
    start, ping, *_ = events_of(response.content)
    usage = start["message"]["usage"]
    assert usage["cache_read_input_tokens"] == 4 and usage["input_tokens"] > 4
    assert ping == {"type": "ping"}


async def test_same_request_as_over_openai(cluster: Cluster) -> None:
    options = {"seed": 3, "ignore_eos": True, "temperature": 0.5, "top_p": 0.5, "top_k": 5}
    body = {**BODY, **options, "system": "Be brief.", "stop_sequences": ["zz"]}
    await whole(cluster.http, body)
    ours = await submitted(cluster)
    messages = [{"role": "system", "content": "Be brief."}, *BODY["messages"]]
    chat = {"messages": messages, "max_tokens": 100, "stop": ["zz"], **options}
    await cluster.http.post(CHAT, json=chat)
    theirs = await submitted(cluster)
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.sampling == theirs.sampling


@pytest.mark.parametrize("send", [whole, streamed])
async def test_stop_reasons(cluster: Cluster, send: Any) -> None:
    stopped = await send(cluster.http, {**BODY, "stop_sequences": ["zz", " you", "fox"]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " you")
    assert stopped["content"] == [{"type": "text", "text": "hello world, how are"}]
    cut = await send(cluster.http, {**BODY, "max_tokens": 3})
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    assert cut["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("send", [whole, streamed])
async def test_max_tokens_are_cut_to_the_room(cluster: Cluster, send: Any) -> None:
    message = await send(cluster.http, {**BODY, "max_tokens": 32_000})
    assert message["hearth"]["warnings"][0].startswith("max_tokens: 32000 is cut to ")
    request = await submitted(cluster)
    num_prompt = len(unpack_token_ids(request.prompt_token_ids))
    assert request.sampling.max_tokens == 512 - num_prompt


async def test_system_and_its_billing_header(cluster: Cluster) -> None:
    plain = await prompt_of(cluster, system=[{"type": "text", "text": "a"}])
    for number in range(2):
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
        block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
        blocks = [{"type": "text", "text": header}, block]
        assert await prompt_of(cluster, system=blocks) == plain
        assert await prompt_of(cluster, system=f"{header}\n\na") == plain
    assert await prompt_of(cluster, system="x-anthropic-billing-header: a") == await prompt_of(
        cluster
    )


async def test_system_message_keeps_its_place(cluster: Cluster) -> None:
    messages = [*BODY["messages"], {"role": "system", "content": [{"type": "text", "text": "S"}]}]
    prompt = await prompt_of(cluster, messages=messages, system="first")
    assert prompt.index("first") < prompt.index("block hash") < prompt.index("system\nS")


async def test_blocks_of_text(cluster: Cluster) -> None:
    """Turns of one role are one; documents are text; what no one can read is left out."""
    source = {"type": "text", "media_type": "text/plain", "data": "D"}
    content = {"type": "content", "content": [{"type": "text", "text": "E"}]}
    messages = [
        {"role": "user", "content": "U1"},
        {"role": "user", "content": [{"type": "document", "source": source, "title": "T"}]},
        {"role": "user", "content": [{"type": "document", "source": content}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "xx"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A"}]},
        {"role": "user", "content": []},
    ]
    prompt = await prompt_of(cluster, messages=messages)
    assert "user\nU1\nT\nD\nE" in prompt
    assert prompt.count("assistant\n") == 2 and "xx" not in prompt


def test_blocks_of_a_conversation_with_searches() -> None:
    """The text of a client's own search is read; what a server ran is left out."""
    found = {
        "type": "search_result",
        "source": "https://example.org/a",
        "title": "TITLE",
        "content": [{"type": "text", "text": "FACT"}],
        "citations": {"enabled": True},
    }
    ran = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "f", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "content": "xx"},
        {"type": "code_execution_tool_result", "tool_use_id": "srvtoolu_2", "content": {}},
        {"type": "tomorrow_tool_use", "id": "srvtoolu_3", "input": {}},
        {"type": "tomorrow_tool_result", "tool_use_id": "srvtoolu_3", "content": {"text": "xx"}},
    ]
    reference = {"type": "tool_reference", "tool_name": "clock"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [found, reference, *ran]}
    messages = [
        {"role": "user", "content": [found, {"type": "container_upload", "file_id": "f1"}]},
        {"role": "assistant", "content": [*ran, {"type": "text", "text": "FOUND"}]},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": ran},
        {"role": "user", "content": [{"type": "compaction", "content": "SUMMARY"}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    body = COUNT_FIELDS.decode(json.dumps({**BODY, "messages": messages}).encode())
    prompt = request_of(body).prompt
    assert isinstance(prompt, ChatPrompt)
    shown = prompt.messages
    text = "TITLE\nhttps://example.org/a\nFACT"
    assert [(each["role"], each["content"]) for each in shown] == [
        ("user", text),
        ("assistant", "FOUND"),
        ("user", "U\nSUMMARY"),
        ("assistant", ""),
        ("tool", f"{text}\nclock"),
    ]


@pytest.mark.parametrize("inline_bytes", [prepared_bodies.MAX_INLINE_BYTES, 1])
async def test_count_tokens_is_exact(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", inline_bytes)
    for fields in ({}, {"system": "s 😀"}, {"thinking": {"type": "disabled"}}):
        body = {**BODY, **fields}
        usage = (await whole(cluster.http, body))["usage"]
        body.pop("max_tokens")
        response = await cluster.http.post(COUNT, json=body)
        assert response.status_code == 200, response.text
        total = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert response.json() == {"input_tokens": total}
        assert response.headers["request-id"]
    long = {**BODY, "messages": [{"role": "user", "content": "a b " * 600}]}
    assert (await cluster.http.post(COUNT, json=long)).json()["input_tokens"] > 512


async def test_key_in_a_header_of_its_own(cluster: Cluster) -> None:
    headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "x,y"}
    async with httpx.AsyncClient(base_url=cluster.gateway.http_address, headers=headers) as http:
        assert (await whole(http, BODY))["content"]
        assert (await http.post(COUNT, json=BODY)).status_code == 200
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.head("/")).status_code == 200
        for other in ("", "Basic dTpw", "Bearer"):
            answer = await http.post(COUNT, json=BODY, headers={"authorization": other})
            assert answer.status_code == 200, (other, answer.text)


async def test_models_have_the_fields_of_both_lists(cluster: Cluster) -> None:
    models = (await cluster.http.get("/v1/models", params={"limit": 1000})).json()
    assert (models["object"], models["has_more"]) == ("list", False)
    assert models["first_id"] == models["last_id"] == "tiny"
    (entry,) = models["data"]
    assert (entry["object"], entry["type"], entry["display_name"]) == ("model", "model", "tiny")
    assert entry["max_input_tokens"] == entry["max_tokens"] == entry["max_context"] == 512
    assert entry["created_at"].endswith("Z")
    assert (await cluster.http.get("/v1/models/tiny")).json() == entry


async def test_session_of_a_user(cluster: Cluster) -> None:
    await whole(cluster.http, {**BODY, "metadata": {"user_id": "u" * 1000}})
    assert (await cluster.scheduler.submits.get()).affinity_key
    await whole(cluster.http, BODY)
    assert not (await cluster.scheduler.submits.get()).affinity_key


async def test_ignored_fields(cluster: Cluster) -> None:
    ignored = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "service_tier": "auto",
        "speed": "fast",
        "container": None,
        "inference_geo": "us",
        "diagnostics": {"a": 1},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
    }
    body = {**BODY, **ignored, "max_tokens": 32_000, "metadata": {"user_id": "{}"}}
    assert message_of(
        events_of((await cluster.http.post(MESSAGES, json={**body, "stream": True})).content)
    )["content"]
