"""The events of a stream of the Responses API, each checked against the vendor's strict types."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

STRICT_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
STRICT_RESPONSE = TypeAdapter(Response)
ENDS = ("response.completed", "response.incomplete", "response.failed")


def events_of(encoded: bytes) -> list[dict[str, Any]]:
    """Of a whole stream, which has nothing after its last event."""
    events = []
    for block in encoded.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        STRICT_EVENT.validate_json(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    check_order(events)
    return events


def check_order(events: list[dict[str, Any]]) -> None:
    """Checks what holds for each stream; its items are those of its end."""
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    kinds = [each["type"] for each in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert [each for each in kinds if each in ENDS] == kinds[-1:]
    last = events[-1]["response"]
    assert {each["response"]["id"] for each in events if "response" in each} == {last["id"]}
    added = [each for each in events if each["type"] == "response.output_item.added"]
    done = [each for each in events if each["type"] == "response.output_item.done"]
    assert [each["item"] for each in done] == last["output"]
    assert [each["output_index"] for each in done] == list(range(len(done)))
    assert [each["item"]["id"] for each in added][: len(done)] == [
        each["item"]["id"] for each in done
    ]
    for each in events:
        if "item_id" in each:
            assert each["item_id"] == added[each["output_index"]]["item"]["id"]


def joined_deltas(events: list[dict[str, Any]], kind: str) -> str:
    return "".join(each["delta"] for each in events if each["type"] == f"response.{kind}.delta")
