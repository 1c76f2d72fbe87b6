"""Recorded events through the encoder of Messages, and its tools and thinking."""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Sequence
from typing import Any

import pytest

from services.gateway.dialects.anthropic.response import MessageEncoder
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
from services.gateway.output.framing import LINES, SSE, Framing
from services.gateway.output.results import Results
from services.gateway.request.endpoint import ResponseContext
from services.gateway.request.output_merger import OutputMerger
from tests.services.gateway.dialects.anthropic.stream import events_of, message_of

KEY = b"key"
RECORDED: list[list[Event]] = [
    [ReasoningDelta(0, ["let me", " see"])],
    [ReasoningDelta(0, ["!"])],
    [TextDelta(0, ["It", " is"]), TextDelta(0, ["1", ""])],
    [ToolCallStart(0, 0, "call_1", "clock"), ToolArgumentsDelta(0, 0, '{"zone":')],
    [ToolArgumentsDelta(0, 0, '"UTC"}'), ToolCallEnd(0, 0)],
    [ToolCallStart(0, 1, "other", "noop"), ToolCallEnd(0, 1)],
    [Finished(0, "tool_calls"), Usage(7, 3, 11, 4)],
]
SIGNATURE = base64.b64encode(hmac.digest(KEY, b"let me see!", "sha256")).decode()
CONTENT = [
    {"type": "thinking", "thinking": "let me see!", "signature": SIGNATURE},
    {"type": "text", "text": "It is1"},
    {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {"zone": "UTC"}},
    {"type": "tool_use", "id": "other", "name": "noop", "input": {}},
]
USAGE = {
    "input_tokens": 4,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 3,
    "output_tokens": 11,
}


def encoder(framing: Framing = SSE, *warnings: str) -> MessageEncoder:
    merger = OutputMerger(())
    context = ResponseContext(merger, {}, "r1", "m", 1, framing, state=KEY)  # type: ignore[arg-type]
    return MessageEncoder(context, warnings)


def streamed(recorded: Sequence[Sequence[Event]], *warnings: str) -> dict[str, Any]:
    own = encoder(SSE, *warnings)
    encoded = b"".join(b"".join(own.events(events)) for events in recorded) + own.closing()
    return message_of(events_of(encoded))


def collected(recorded: Sequence[Sequence[Event]], *warnings: str) -> dict[str, Any]:
    results = Results()
    for event in (each for events in recorded for each in events):
        results.add(event)
    message: dict[str, Any] = json.loads(b"".join(encoder(SSE, *warnings).body(results)))
    return message


@pytest.mark.parametrize("send", [streamed, collected])
def test_all_blocks(send: Any) -> None:
    message = send(RECORDED, "a warning")
    assert message["content"] == CONTENT
    assert message["usage"] == USAGE
    assert (message["id"], message["model"]) == ("msg_r1", "m")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["hearth"] == {"warnings": ["a warning"]}


@pytest.mark.parametrize("send", [streamed, collected])
def test_empty_answer(send: Any) -> None:
    message = send([[Finished(0, "stop", "END"), Usage(2, None, 1)]])
    assert (message["content"], message["stop_reason"]) == ([], "stop_sequence")
    assert message["stop_sequence"] == "END"
    assert message["usage"]["input_tokens"] == 2 and "hearth" not in message


def test_call_that_is_cut_or_no_json() -> None:
    cut = [ToolCallStart(0, 0, "call_1", "f"), ToolArgumentsDelta(0, 0, '{"a": ')]
    message = collected([cut, [Finished(0, "length"), Usage(1, 0, 1)]])
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    message = collected([cut, [Finished(0, "stop"), Usage(1, 0, 1)]])
    assert message["content"] == [{"type": "text", "text": '{"a": '}]


def test_silence_has_pings() -> None:
    assert encoder().keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_blocks_of_one_kind_that_do_not_follow_each_other() -> None:
    texts = [TextDelta(0, ["a"]), ReasoningDelta(0, ["b"]), TextDelta(0, ["c"])]
    message = streamed([texts, [Finished(0, "stop"), Usage(1, 0, 1)]])
    assert [each["type"] for each in message["content"]] == ["text", "thinking", "text"]


def test_lines_over_nats() -> None:
    own = encoder(LINES)
    encoded = b"".join(b"".join(own.events(each)) for each in RECORDED)
    kinds = [json.loads(each)["type"] for each in encoded.splitlines()]
    assert (kinds[:2], kinds[-1]) == (["message_start", "ping"], "message_stop")


def test_input_that_a_float_or_utf8_cannot_hold() -> None:
    written = '{"a": 1e400,\n "b": "\\ud800"}'
    called = [ToolCallStart(0, 0, "call_1", "f"), ToolArgumentsDelta(0, 0, written)]
    message = collected([[*called, ToolCallEnd(0, 0), Finished(0, "tool_calls"), Usage(1, 0, 1)]])
    assert [each.get("input") for each in message["content"]] == [json.loads(written)]
