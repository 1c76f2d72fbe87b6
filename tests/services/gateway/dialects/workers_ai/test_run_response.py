"""Recorded events through the encoder of `ai/run`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from services.gateway.dialects.workers_ai.padding import PaddedTextEvent
from services.gateway.dialects.workers_ai.run_response import RunEncoder, RunFrame
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
from services.gateway.output.framing import LINES, SSE, Framing, TextEvent
from services.gateway.output.results import Results
from shared.errors import NoCapacity

RECORDED: list[list[Event]] = [
    [ReasoningDelta(0, ["let me", " see"])],
    [TextDelta(0, ["It", " is"]), TextDelta(0, ["1"])],
    [ToolCallStart(0, 0, "call_1", "clock"), ToolArgumentsDelta(0, 0, '{"zone":')],
    [ToolArgumentsDelta(0, 0, '"UTC"}'), ToolCallEnd(0, 0)],
    [ToolCallStart(0, 1, "call_2", "noop"), ToolCallEnd(0, 1)],
    [Finished(0, "tool_calls"), Usage(7, 3, 11, 4)],
]
CALLS = [
    {"id": "call_1", "name": "clock", "arguments": {"zone": "UTC"}},
    {"id": "call_2", "name": "noop", "arguments": {}},
]
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 11,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 3},
}


def encoder(framing: Framing = SSE, *, has_padding: bool = False) -> RunEncoder:
    if has_padding:
        return RunEncoder(framing, PaddedTextEvent(framing, bytes))
    return RunEncoder(framing, TextEvent(framing, lambda text: RunFrame(response=text)))


def streamed(
    recorded: Sequence[Sequence[Event]], framing: Framing = SSE, *, has_padding: bool = False
) -> list[Any]:
    own = encoder(framing, has_padding=has_padding)
    encoded = b"".join(b"".join(own.events(events)) for events in recorded) + own.closing()
    assert encoded.endswith(framing.done)
    frames = encoded.removesuffix(framing.done).split(framing.after)[:-1]
    assert all(each.startswith(framing.before) for each in frames)
    return [json.loads(each.removeprefix(framing.before)) for each in frames]


def collected(recorded: Sequence[Sequence[Event]], own: RunEncoder | None = None) -> Any:
    results = Results()
    for event in (each for events in recorded for each in events):
        results.add(event)
    return json.loads(b"".join((own or encoder()).body(results)))


@pytest.mark.parametrize(
    ("text", "value"),
    [('{"a": [1]}', {"a": [1]}), ("1e3", 1000.0), ('{"a": [1', '{"a": [1'), ("", "")],
)
def test_json_is_a_value_unless_it_is_cut(text: str, value: Any) -> None:
    events = [[TextDelta(0, [text]), Finished(0, "length"), Usage(7, 3, 11, 4)]]
    own = RunEncoder(SSE, TextEvent(SSE, lambda each: RunFrame(response=each)), is_json=True)
    assert collected(events, own)["result"]["response"] == value
    assert collected(events)["result"]["response"] == text


@pytest.mark.parametrize("framing", [SSE, LINES])
@pytest.mark.parametrize("has_padding", [False, True])
def test_stream(framing: Framing, has_padding: bool) -> None:
    reasoning, *texts, calls, last = streamed(RECORDED, framing, has_padding=has_padding)
    assert reasoning == {"response": "", "reasoning_content": "let me see"}
    assert [each["response"] for each in texts] == ["It", " is", "1"]  # never the number 1
    assert [list(each) for each in texts] == [["response", *["p"] * has_padding]] * 3
    assert calls == {"response": "", "tool_calls": CALLS}
    assert last == {"response": "", "usage": USAGE, "finish_reason": "tool_calls"}


def test_body() -> None:
    assert collected(RECORDED) == {
        "result": {
            "response": "It is1",
            "reasoning_content": "let me see",
            "tool_calls": CALLS,
            "usage": USAGE,
            "finish_reason": "tool_calls",
        },
        "success": True,
        "errors": [],
        "messages": [],
    }


def test_plain_text() -> None:
    """Without fields that are not there: clients read a null as a list of calls."""
    recorded = [[TextDelta(0, ["1"])], [Finished(0, "length"), Usage(2, None, 1)]]
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    last = {"response": "", "usage": usage, "finish_reason": "length"}
    assert streamed(recorded) == [{"response": "1"}, last]
    assert collected(recorded)["result"] == {**last, "response": "1"}


def test_stream_without_a_text() -> None:
    frames = streamed([[Finished(0, "stop"), Usage(2, 0, 0)]])
    assert [each["response"] for each in frames] == [""]
    assert frames[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_arguments_that_are_no_json() -> None:
    """Those of a call that `max_tokens` cut are left out, others are sent as text."""
    start = [ToolCallStart(0, 0, "a", "f"), ToolArgumentsDelta(0, 0, '{"x": '), ToolCallEnd(0, 0)]
    cut = [[*start, Finished(0, "length"), Usage(1, 1, 1)]]
    assert [list(each) for each in streamed(cut)] == [["response", "usage", "finish_reason"]]
    assert "tool_calls" not in collected(cut)["result"]
    ended = [[*start, Finished(0, "tool_calls"), Usage(1, 1, 1)]]
    assert streamed(ended)[0]["tool_calls"][0]["arguments"] == '{"x": '


def test_arguments_that_a_float_or_utf8_cannot_hold() -> None:
    written = '{"a": 1e400,\n "b": "\\ud800"}'
    start = [ToolCallStart(0, 0, "a", "f"), ToolArgumentsDelta(0, 0, written), ToolCallEnd(0, 0)]
    ended = [[*start, Finished(0, "tool_calls"), Usage(1, 1, 1)]]
    for frame in (streamed(ended)[0], collected(ended)["result"]):
        assert frame["tool_calls"][0]["arguments"] == json.loads(written)


def test_errors() -> None:
    error = NoCapacity("no worker")
    own = encoder()
    assert own.error_status(error) == 429
    event = json.loads(own.error_event(error).removeprefix(SSE.before))
    assert event["success"] is False
    assert [each["code"] for each in event["errors"]] == [3040]


def test_warnings() -> None:
    own = RunEncoder(
        LINES, TextEvent(LINES, lambda text: RunFrame(response=text)), lambda: ("a", "b")
    )
    body = json.loads(b"".join(own.body(Results())))
    assert body["messages"] == [{"code": 1000, "message": "a"}, {"code": 1000, "message": "b"}]
    *_, last = b"".join(own.events([Finished(0, "stop"), Usage(2, 0, 0)])).split()
    assert json.loads(last)["warnings"] == ["a", "b"]
