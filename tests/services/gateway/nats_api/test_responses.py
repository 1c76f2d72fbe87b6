"""Responses over NATS are those over HTTP, and errors have their status and headers."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from shared.subjects import api_request
from shared.tenancy.tenant import TENANTS
from shared.transport.decoding.untyped_messages import UntypedMessages
from tests.services.gateway.conftest import ANSWER
from tests.services.gateway.dialects.anthropic.stream import MESSAGES, message_of
from tests.services.gateway.dialects.anthropic.test_messages_http import BODY as MESSAGE
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT, events_of, text_of
from tests.services.gateway.dialects.responses.events import (
    STRICT_EVENT,
    check_order,
    joined_deltas,
)
from tests.services.gateway.nats_api.conftest import Api, all_of, next_of
from tests.services.gateway.samples import sample_sum
from tests.support.grids import in_one_test
from tests.support.waiting import LIMIT_S, until

PATHS = {
    "chat": CHAT,
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "messages": MESSAGES,
    "responses": "/v1/responses",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("chat", {**BODY, "seed": 7, "n": 2}),
    ("chat", {**BODY, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}),
    ("completions", {"prompt": ["hello", "fox"], "max_tokens": 4, "echo": True}),
    ("embeddings", {"input": ["a", "b"]}),
    ("messages", {**MESSAGE, "stop_sequences": ["how"]}),
    ("responses", {"input": "hi", "seed": 7, "max_output_tokens": 4}),
    ("tokenize", {"prompt": "the quick brown fox", "return_token_strs": True}),
    ("tokenize", {"messages": BODY["messages"]}),
    ("detokenize", {"tokens": [5, 6, 7]}),
]
# of a request, not of its text
VOLATILE = ("id", "created", "created_at", "completed_at", "output", "hearth")


def stable(body: Any) -> Any:
    return {key: body[key] for key in body if key not in VOLATILE}


async def test_messages_are_streamed_and_rejected_in_their_dialect(api: Api) -> None:
    events = await api.events("messages", {**MESSAGE, "stream": True})
    message = message_of(events)
    assert message["content"] == [{"type": "text", "text": ANSWER}]
    long = {**MESSAGE, "messages": [{"role": "user", "content": "x y " * 400}]}
    reply = await api.reply("messages", long)
    assert (reply.headers or {})["Nats-Service-Error-Code"] == "400"


@pytest.mark.parametrize(("endpoint", "body"), BODIES)
async def test_body_is_that_of_http(api: Api, endpoint: str, body: dict[str, Any]) -> None:
    over_http = await api.cluster.http.post(PATHS[endpoint], json=body)
    assert over_http.status_code == 200, over_http.text
    reply = await api.client.request(endpoint, body)
    assert stable(reply) == stable(over_http.json())
    raw = await api.reply(endpoint, body)
    assert stable(json.loads(raw.data)) == stable(reply)
    assert (raw.headers or {})["Hearth-Seq"] == "0"


async def test_models_are_those_of_http(api: Api) -> None:
    over_http = (await api.cluster.http.get("/v1/models")).json()
    over_nats = await api.client.request("models", {})
    assert [stable(each) for each in over_nats["data"]] == [
        stable(each) for each in over_http["data"]
    ]
    assert json.loads((await api.reply("models", b"")).data) == over_nats


async def test_stream_has_the_events_of_http(api: Api) -> None:
    fields: dict[str, Any] = {"seed": 7, "n": 2, "stream_options": {"include_usage": True}}
    over_http = await events_of(api.cluster, **fields)
    over_nats = await api.events("chat", {**BODY, **fields})
    assert over_http.pop() == "[DONE]"

    def of_choice(events: list[Any], index: int) -> list[Any]:
        return [each for each in events if [c["index"] for c in each["choices"]] == [index]]

    def said(events: list[Any]) -> Any:
        """Without what depends on when tokens arrive: whether the end is with the last text."""
        choices = [each["choices"][0] for each in events]
        reasons = [each["finish_reason"] for each in choices if each["finish_reason"]]
        roles = [each["delta"]["role"] for each in choices if "role" in each["delta"]]
        envelope = {key: value for key, value in stable(events[0]).items() if key != "choices"}
        return text_of(events), reasons, roles, envelope

    for index in (0, 1):
        assert text_of(of_choice(over_nats, index)) == ANSWER
        assert said(of_choice(over_nats, index)) == said(of_choice(over_http, index))
    assert stable(over_nats[-1]) == stable(over_http[-1])
    assert over_nats[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (None, "stop")])
async def test_messages_are_numbered_and_end_with_a_reason(
    api: Api, max_tokens: int | None, reason: str
) -> None:
    messages = await all_of(
        await api.send("chat", {**BODY, "stream": True, "max_tokens": max_tokens})
    )
    headers = [each.headers or {} for each in messages]
    assert [each["Hearth-Seq"] for each in headers] == [str(n) for n in range(len(messages))]
    assert len({each["Hearth-Request"] for each in headers}) == 1
    *events, end = messages
    assert (end.data, (end.headers or {})["Hearth-End"]) == (b"", reason)
    assert all(each.data.endswith(b"}\n") for each in events)
    assert not [each.reply for each in messages if each.reply]


async def test_embedding_is_never_streamed(api: Api) -> None:
    reply = await api.reply("embeddings", {"input": "a", "stream": True})
    assert json.loads(reply.data)["object"] == "list"


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


def check_error(reply: Any, status: int, code: str, param: str | None) -> None:
    headers = reply.headers or {}
    assert (headers["Nats-Service-Error-Code"], headers["Hearth-End"]) == (str(status), "error")
    error = json.loads(reply.data)["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert headers["Nats-Service-Error"] == error["message"]


DEADLINE = "Hearth-Deadline-S"
REJECTED: list[tuple[str, Any, dict[str, str] | None, int, str, str | None]] = [
    ("chat", {"messages": []}, None, 400, "invalid_request", "messages"),
    ("chat", {**BODY, "n": 0, "stream": True}, None, 400, "invalid_request", "n"),
    ("completions", {"prompt": []}, None, 400, "invalid_request", "prompt"),
    ("embeddings", {"input": "a", "dimensions": 3}, None, 400, "invalid_request", "dimensions"),
    ("tokenize", {}, None, 400, "invalid_request", "prompt"),
    ("detokenize", {"tokens": [10**6]}, None, 400, "invalid_request", "tokens"),
    ("nothing", BODY, None, 404, "not_found", None),
    *(
        ("chat", BODY, {DEADLINE: text}, 400, "invalid_request", DEADLINE)
        for text in ("nan", "inf", "-1", "0", "soon", "")
    ),
    ("chat", BODY, {"A": "x" * 65_536}, 413, "payload_too_large", None),
    ("cancel", {}, None, 400, "invalid_request", "request"),
    ("cancel", b"{", None, 400, "invalid_request", None),
]


@in_one_test(("endpoint", "body", "headers", "status", "code", "param"), REJECTED)
async def test_bad_request_gets_one_error(
    api: Api,
    endpoint: str,
    body: Any,
    headers: dict[str, str] | None,
    status: int,
    code: str,
    param: str | None,
) -> None:
    replies = await api.send(endpoint, body, headers=headers)
    check_error(await next_of(replies), status, code, param)
    assert (await api.client.request("chat", BODY))["choices"]  # the subscription goes on
    assert replies.empty()


async def test_malformed_headers_are_rejected(api: Api) -> None:
    """Written by hand: nats-py sends no such headers."""
    replies = await api.send("models", b"")
    await next_of(replies)
    for encoded in (b"NATS/2.0\r\n\r\n", b"NATS/1.0\r\nHearth-Affinity: \xff\r\n\r\n", b"x"):
        inbox = api.raw.new_inbox()
        subscription = await api.raw.subscribe(inbox)
        data = json.dumps(BODY).encode()
        head = f"HPUB {api_request('chat', 'client-1')} {inbox} {len(encoded)} "
        line = f"{head}{len(encoded) + len(data)}\r\n".encode()
        await api.raw._send_command(line + encoded + data + b"\r\n")
        await api.raw.flush()
        check_error(await subscription.next_msg(timeout=LIMIT_S), 400, "invalid_request", None)


async def test_client_without_a_tenant_is_rejected(api: Api) -> None:
    gateway = api.cluster.gateway
    await gateway.tenancy.stores.fast.write([("HDEL", TENANTS, "tenant-1")])
    gateway.api_keys._known.clear()
    check_error(await api.reply("chat", BODY), 403, "unknown_tenant", None)


async def test_request_that_cannot_be_answered_is_dropped_and_counted(api: Api) -> None:
    """Or a client could let the gateway send a command, or a message to another client."""
    counted = partial(sample_sum, api.cluster.gateway, "hearth_dropped_messages_total")
    foreign = (
        *("", "_INBOX.client-2.abc", "_INBOX.client-1", "_INBOX.client-1.*", "_INBOX.client-1.>"),
        *("_INBOX.gateway-1.-.abc", "hearth.v1.decode.decode-1.-.control.gateway-1.-"),
    )
    before = counted()
    data = json.dumps(BODY).encode()
    for reply in foreign:
        head = f"PUB {api_request('chat', 'client-1')} {reply} {len(data)}\r\n".encode()
        await api.raw._send_command(head + data + b"\r\n")
    await api.raw.flush()
    await until(lambda: counted() - before == len(foreign))
    assert not api.cluster.scheduler.submitted


async def test_connection_that_takes_no_message_is_a_stall(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, held_s = UntypedMessages.send, 0.02

    async def send_late(self: UntypedMessages, *args: Any, **fields: Any) -> None:
        await asyncio.sleep(held_s)  # as if the connection's buffer were full
        await send(self, *args, **fields)

    monkeypatch.setattr(UntypedMessages, "send", send_late)
    for body in (BODY, {**BODY, "stream": True}):
        reply = await api.reply("chat", body)
        request_id = (reply.headers or {})["Hearth-Request"]
        ring = api.cluster.gateway.telemetry.ring
        await until(
            lambda ring=ring, one=request_id: one in ring._encoded or one in ring._compressed
        )
        timeline = ring.get(request_id)
        assert timeline is not None
        stall = next(each for each in timeline.gateway_phases if each.name == "client_stall")
        assert stall.duration_s >= held_s


async def test_responses_api_has_its_events_as_lines(api: Api) -> None:
    events = await api.events("responses", {"input": "hi"})
    for each in events:
        STRICT_EVENT.validate_json(json.dumps(each))
    check_order(events)
    assert joined_deltas(events, "output_text") == ANSWER
    first = events[-1]["response"]
    on = {"input": "on", "previous_response_id": first["id"]}
    second = await api.client.request("responses", on)
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    found = await api.cluster.http.get(f"/v1/responses/{first['id']}")
    assert found.json() == first
