"""Reads a stream of Messages as its clients do: events in their order make up a message."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec

from services.gateway.dialects.anthropic.response_types import StreamEvent

MESSAGES = "/v1/messages"
_EVENT = msgspec.json.Decoder(StreamEvent)
_TEXTS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Each with the event line of its type. Comments are left out."""
    events = []
    for part in data.decode().split("\n\n")[:-1]:
        if part.startswith(":"):
            continue
        name, body = part.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "error":
            _EVENT.decode(body.removeprefix("data: "))
        events.append(event)
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Puts the events together. Blocks must have their order, and never mix."""
    first, *rest = [each for each in events if each["type"] != "ping"]
    assert events[1]["type"] == "ping"
    assert (first["type"], rest.pop()["type"]) == ("message_start", "message_stop")
    end = rest.pop()
    assert end["type"] == "message_delta"
    message = {**first["message"], **end["delta"]}
    assert (first["message"]["content"], first["message"]["stop_reason"]) == ([], None)
    assert first["message"]["usage"]["output_tokens"] == 1
    is_open = False
    for event in rest:
        content = message["content"]
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(content)
                content.append({**event["content_block"], "partial_json": ""})
            case "content_block_delta":
                assert is_open and event["index"] == len(content) - 1
                kind = event["delta"]["type"]
                content[-1][_TEXTS[kind]] += event["delta"][_TEXTS[kind]]
            case "content_block_stop":
                assert is_open and event["index"] == len(content) - 1
                _complete(content[-1])
            case other:
                raise AssertionError(other)
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    message["usage"] = end["usage"]
    return message | ({"hearth": end["hearth"]} if "hearth" in end else {})


def _complete(block: dict[str, Any]) -> None:
    arguments = block.pop("partial_json")
    if block["type"] == "tool_use":
        block["input"] = json.loads(arguments or "{}")


async def streamed(http: httpx.AsyncClient, body: Any) -> dict[str, Any]:
    response = await http.post(MESSAGES, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["request-id"] == response.headers["x-request-id"]
    return message_of(events_of(response.content))


async def whole(http: httpx.AsyncClient, body: Any) -> dict[str, Any]:
    response = await http.post(MESSAGES, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    return response.json()
