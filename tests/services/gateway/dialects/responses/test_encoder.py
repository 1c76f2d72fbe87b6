"""Recorded events through the encoder of the Responses API."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from openai.types.responses.response_item import ResponseItem
from pydantic import TypeAdapter

from services.gateway.dialects.responses.encoder import ResponsesEncoder
from services.gateway.dialects.responses.endpoints import CREATE
from services.gateway.dialects.responses.fields import RESPONSES_FIELDS
from services.gateway.dialects.responses.storage.record import (
    ResponseRecord,
    TenantState,
    input_items_of,
    stored_items,
)
from services.gateway.output.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from services.gateway.output.framing import LINES
from services.gateway.output.results import Results
from services.gateway.tenancy.errors import LimitIsZero, RequestsExhausted
from shared.errors import DeadlineExceeded, GrammarFailed, HearthError, Overloaded, PromptTooLong
from shared.store import StoreRejected
from tests.services.gateway.dialects.responses.events import (
    STRICT_RESPONSE,
    events_of,
    joined_deltas,
)
from tests.services.gateway.dialects.test_encoders import context

USAGE = Usage(7, 3, 11, 4)
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "fs", "description": "files", "tools": [CLOCK]}
PATCH = {"type": "custom", "name": "patch"}
RECORDED: list[list[Event]] = [
    [ReasoningDelta(0, ["let me", " see"])],
    [TextDelta(0, ["It", " is\u2028"]), TextDelta(0, ['"\n'])],
    [ToolCallStart(0, 0, "call_1", "fs__clock"), ToolArgumentsDelta(0, 0, '{"zone":')],
    [ToolArgumentsDelta(0, 0, '"UTC"}'), ToolCallEnd(0, 0)],
    [ToolCallStart(0, 1, "call_2", "patch", is_custom=True)],
    [ToolArgumentsDelta(0, 1, '{"input": "a\\n"}'), ToolCallEnd(0, 1)],
    [Finished(0, "tool_calls")],
    [USAGE],
]


def encoder_of(state: TenantState | None = None, **fields: Any) -> ResponsesEncoder:
    body = RESPONSES_FIELDS.decode(json.dumps({"input": "hi", **fields}).encode())
    return ResponsesEncoder(body, dataclasses.replace(context(), now=lambda: 5.5, state=state))


def listed_items(record: ResponseRecord) -> list[dict[str, Any]]:
    items = [(item_id, json.loads(bytes(item))) for item_id, item in input_items_of(record)]
    assert [item_id for item_id, _ in items] == [item["id"] for _, item in items]
    return [item for _, item in items]


def stream_of(
    encoder: ResponsesEncoder, batches: Sequence[Sequence[Event]]
) -> list[dict[str, Any]]:
    encoded = b"".join(b"".join(encoder.events(batch)) for batch in batches)
    return events_of(encoded + encoder.closing())


def body_of(encoder: ResponsesEncoder, batches: Sequence[Sequence[Event]]) -> dict[str, Any]:
    results = Results()
    for event in (each for batch in batches for each in batch):
        results.add(event)
    encoded = b"".join(encoder.body(results))
    STRICT_RESPONSE.validate_json(encoded)
    response: dict[str, Any] = json.loads(encoded)
    return response


def test_stream_says_what_the_events_say() -> None:
    events = stream_of(encoder_of(tools=[NAMESPACE, PATCH]), RECORDED)
    assert joined_deltas(events, "reasoning_text") == "let me see"
    assert joined_deltas(events, "output_text") == 'It is\u2028"\n'
    assert json.loads(joined_deltas(events, "function_call_arguments")) == {"zone": "UTC"}
    assert joined_deltas(events, "custom_tool_call_input") == "a\n"
    response = events[-1]["response"]
    reasoning, message, call, custom = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me see"}]
    assert message["content"][0]["text"] == 'It is\u2028"\n'
    assert (call["name"], call["namespace"], call["call_id"]) == ("clock", "fs", "call_1")
    assert (custom["name"], custom["input"], "namespace" in custom) == ("patch", "a\n", False)
    assert {each["status"] for each in response["output"]} == {"completed"}
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 11,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 18,
    }
    assert (response["created_at"], response["completed_at"]) == (1, 5)
    assert all(isinstance(response[f"{each}_at"], int) for each in ("created", "completed"))


def test_silence_has_the_head_and_then_events_that_change_nothing() -> None:
    encoder = encoder_of()
    silent = [encoder.keep_alive(), encoder.keep_alive()]
    encoded = b"".join((*silent, *encoder.events([TextDelta(0, ["a"])])))
    events = events_of(encoded + b"".join(encoder.events([Finished(0, "stop"), USAGE])))
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[:4] == ["created", "in_progress", "in_progress", "output_item.added"]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))


def test_body_is_the_response_at_the_end_of_the_stream() -> None:
    events = stream_of(encoder_of(tools=[NAMESPACE, PATCH]), RECORDED)
    assert body_of(encoder_of(tools=[NAMESPACE, PATCH]), RECORDED) == events[-1]["response"]


def test_output_without_text_has_an_empty_message() -> None:
    events = stream_of(encoder_of(), [[Finished(0, "stop"), USAGE]])
    (message,) = events[-1]["response"]["output"]
    assert message["content"] == [
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    ]


@pytest.mark.parametrize(
    "opened",
    [
        [TextDelta(0, ["cut"])],
        [ToolCallStart(0, 0, "call_1", "clock"), ToolArgumentsDelta(0, 0, '{"a')],
    ],
)
def test_output_that_is_cut_is_incomplete(opened: list[Event]) -> None:
    batches = [opened, [Finished(0, "length"), USAGE]]
    last = stream_of(encoder_of(tools=[CLOCK]), batches)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [each["status"] for each in last["response"]["output"]] == ["incomplete"]
    assert body_of(encoder_of(tools=[CLOCK]), batches) == last["response"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Overloaded("full", retry_after_s=1.5), "rate_limit_exceeded", "try again in 1.5s"),
        (RequestsExhausted("no", retry_after_s=2, headers={}), "rate_limit_exceeded", "in 2s"),
        (PromptTooLong("long"), "context_length_exceeded", "long"),
        (LimitIsZero("zero"), "insufficient_quota", "zero"),
        (GrammarFailed("g"), "invalid_prompt", "g"),
        (DeadlineExceeded("late"), "server_error", "late"),
        (StoreRejected("script of hearth:t:meter"), "server_error", "Redis answered with an error"),
    ],
)
def test_error_after_the_head_is_a_failed_response(
    error: HearthError, code: str, message: str
) -> None:
    for batches in ([], [[TextDelta(0, ["a"])]]):
        encoder = encoder_of()
        encoded = b"".join(b"".join(encoder.events(batch)) for batch in batches)
        encoded += encoder.error_event(error)
        last = json.loads(encoded.split(b"data: ")[-1])
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == code
        assert message in last["response"]["error"]["message"]
        assert "hearth:t" not in last["response"]["error"]["message"]
        assert encoded.startswith(b"event: response.created\n")
        if code not in ("context_length_exceeded", "insufficient_quota"):  # of clients, not of it
            assert events_of(encoded)[-1] == last
        assert last["sequence_number"] == encoded.count(b"data: ") - 1


def test_lines_have_no_names() -> None:
    body = RESPONSES_FIELDS.decode(b'{"input": "hi"}')
    encoder = ResponsesEncoder(body, context(LINES))
    lines = b"".join(b"".join(encoder.events(batch)) for batch in RECORDED).splitlines()
    kinds = [msgspec.json.decode(line)["type"] for line in lines]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_complete_response_is_stored_once() -> None:
    saved: list[ResponseRecord] = []
    state = TenantState(save=saved.append)
    events = stream_of(encoder_of(state, previous_response_id="resp_1"), RECORDED)
    (record,) = saved
    assert events[0]["response"]["store"] is True
    assert json.loads(record.response) == events[-1]["response"]
    assert record.previous == "resp_1"
    (item,) = listed_items(record)
    assert item["content"] == [{"type": "input_text", "text": "hi"}]
    assert item["id"].startswith("msg_")
    events = stream_of(encoder_of(state, store=False), RECORDED)
    assert len(saved) == 1 and events[-1]["response"]["store"] is False


def test_input_items_are_those_of_the_vendor() -> None:
    call, custom = {"call_id": "c1", "name": "f"}, {"call_id": "c2", "name": "g"}
    given = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"type": "function_call", **call, "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "e"},
        {"type": "custom_tool_call", **custom, "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"text": "e"}]},
    ]
    saved: list[ResponseRecord] = []
    body_of(encoder_of(TenantState(save=saved.append), input=given), RECORDED)
    listed = listed_items(saved[0])
    for each in listed:
        TypeAdapter(ResponseItem).validate_json(json.dumps(each))
    assert [each["type"] for each in listed] == [each.get("type", "message") for each in given]
    assert len({each["id"] for each in listed}) == len(given)


def test_reasoning_is_stored_without_what_costs_no_tokens() -> None:
    summary = [{"type": "summary_text", "text": "s" * 1000}]
    item = {"type": "reasoning", "summary": summary, "encrypted_content": "x" * 1000}
    body = RESPONSES_FIELDS.decode(json.dumps({"input": [item]}).encode())
    assert len(stored_items(body.items)) < 200


def test_large_body_is_stored_without_its_prompt() -> None:
    """A preparation process returns it without its conversation."""
    fields = {"input": "hi", "tools": [NAMESPACE, PATCH], "hearth_history": [{"role": "user"}]}
    body = RESPONSES_FIELDS.decode(json.dumps(fields).encode())
    short = RESPONSES_FIELDS.decode(msgspec.json.encode(CREATE.without_prompts(body, 1)))
    assert short.input == "" and short.history == [] and short.tools == body.tools
    saved: list[ResponseRecord] = []
    made = dataclasses.replace(context(), state=TenantState(save=saved.append))
    stream_of(ResponsesEncoder(short, made), RECORDED)
    assert listed_items(saved[0])[0]["content"] == [{"type": "input_text", "text": "hi"}]


def test_hosted_tools_are_named_in_warnings() -> None:
    encoder = encoder_of(tools=[{"type": "web_search"}, CLOCK], truncation="auto")
    response = body_of(encoder, RECORDED)
    assert [each["type"] for each in response["tools"]] == ["function"]
    first, second = response["hearth"]["warnings"]
    assert first.startswith("tools[0]: web_search") and second.startswith("truncation")


def test_reasoning_is_sealed_if_it_is_asked_for() -> None:
    state = TenantState(seal=lambda text: f"sealed {text}")
    asked = {"include": ["reasoning.encrypted_content"]}
    for fields, expected in (({}, None), (asked, "sealed let me see")):
        response = body_of(encoder_of(state, **fields), RECORDED)
        assert response["output"][0]["encrypted_content"] == expected
