"""One recorded stream of events through each dialect's encoder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from services.gateway.dialects.openai.chat_response import ChatEncoder
from services.gateway.dialects.openai.completion_response import CompletionEncoder
from services.gateway.dialects.openai.tool_calls import input_of
from services.gateway.output.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
    with_ends,
)
from services.gateway.output.framing import LINES, SSE, Framing
from services.gateway.output.results import Results
from services.gateway.request.endpoint import ResponseContext
from services.gateway.request.output_merger import OutputMerger

RECORDED: list[list[Event]] = [
    [ReasoningDelta(0, ["let me", " see"])],
    [TextDelta(0, ["It", " is"]), TextDelta(1, ["1"])],
    [ToolCallStart(0, 0, "call_1", "clock"), ToolArgumentsDelta(0, 0, '{"zone":')],
    [ToolArgumentsDelta(0, 0, '"UTC"}'), ToolCallEnd(0, 0)],
    [ToolCallStart(0, 1, "call_2", "noop"), ToolArgumentsDelta(0, 1, "{}"), ToolCallEnd(0, 1)],
    [Finished(0, "tool_calls")],
    [TextDelta(1, ["2", '"\n']), Finished(1, "stop", "END"), Usage(7, 3, 11, 4)],
]


def context(framing: Framing = SSE) -> ResponseContext:
    merger = OutputMerger(())
    return ResponseContext(merger, {}, "r1", "m", 1, framing)  # type: ignore[arg-type]  # no tokens


def results() -> Results:
    made = Results()
    for event in (each for batch in RECORDED for each in batch):
        made.add(event)
    return made


def lines_of(encoded: bytes, framing: Framing) -> Iterator[bytes]:
    assert encoded.endswith(framing.done)
    for each in encoded.removesuffix(framing.done).split(framing.after)[:-1]:
        assert each.startswith(framing.before)
        yield each.removeprefix(framing.before)


@pytest.mark.parametrize("framing", [SSE, LINES])
def test_chat_stream_says_what_the_events_say(framing: Framing) -> None:
    encoder = ChatEncoder(context(framing), has_usage=True, has_logprobs=False)
    encoded = b"".join(b"".join(encoder.events(batch)) for batch in RECORDED) + encoder.closing()
    strict = TypeAdapter(ChatCompletionChunk)
    chunks = [strict.validate_json(line) for line in lines_of(encoded, framing)]
    usage = chunks[-1].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (7, 11)
    details = usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens == 4
    deltas = [(each.index, each) for chunk in chunks for each in chunk.choices]
    for index, text, reason in [(0, "It is", "tool_calls"), (1, '12"\n', "stop")]:
        of_choice = [each for place, each in deltas if place == index]
        assert "".join(each.delta.content or "" for each in of_choice) == text
        roles = [each.delta.role for each in of_choice]
        assert roles == ["assistant", *[None] * (len(of_choice) - 1)]
        assert [each.finish_reason for each in of_choice if each.finish_reason] == [reason]
    for field in ("reasoning", "reasoning_content"):
        texts = [(each.delta.model_extra or {}).get(field) or "" for _, each in deltas]
        assert "".join(texts) == "let me see"
    calls = [call for _, each in deltas for call in each.delta.tool_calls or ()]
    begun = [call for call in calls if call.id]
    heads = [(call.index, call.id, call.function and call.function.name) for call in begun]
    assert heads == [(0, "call_1", "clock"), (1, "call_2", "noop")]
    arguments = [call.function and call.function.arguments for call in calls if call.index == 0]
    assert "".join(each or "" for each in arguments) == '{"zone":"UTC"}'


@pytest.mark.parametrize("has_usage", [True, False])
def test_each_stream_says_its_warnings(has_usage: bool) -> None:
    """In a last chunk, with a choice unless usage was asked for."""
    warned: Any = SimpleNamespace(outputs=(), warnings=("w",), num_choices=1)
    of = dataclasses.replace(context(), merger=warned)
    chat = ChatEncoder(of, has_usage=has_usage, has_logprobs=False)
    text = CompletionEncoder(of, has_usage=has_usage, has_logprobs=False, num_shown=1)
    for encoder in (chat, text):
        (ending,) = encoder.events([Usage(7, 3, 11, 4)])
        chunk = json.loads(ending.removeprefix(b"data: "))
        assert chunk["hearth"]["warnings"] == ["w"]
        assert ("usage" in chunk, len(chunk["choices"])) == (has_usage, not has_usage)


def test_silence_has_chunks_of_the_dialect() -> None:
    chat = ChatEncoder(context(), has_usage=True, has_logprobs=False).keep_alive()
    chunk = TypeAdapter(ChatCompletionChunk).validate_json(chat.removeprefix(b"data: "))
    assert chunk.choices[0].delta.model_dump(exclude_unset=True) == {}
    text = CompletionEncoder(context(), has_usage=True, has_logprobs=False, num_shown=1)
    chunk = json.loads(text.keep_alive().removeprefix(b"data: "))
    assert [(each["text"], each["finish_reason"]) for each in chunk["choices"]] == [("", None)]


def test_chat_body_says_what_the_events_say() -> None:
    encoder = ChatEncoder(context(), has_usage=False, has_logprobs=False)
    body = TypeAdapter(ChatCompletion).validate_json(b"".join(encoder.body(results())))
    first, second = body.choices
    assert (first.message.content, second.message.content) == ("It is", '12"\n')
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
    calls = [msgspec.to_builtins(each.model_dump()) for each in first.message.tool_calls or ()]
    assert [call["function"] for call in calls] == [
        {"name": "clock", "arguments": '{"zone":"UTC"}'},
        {"name": "noop", "arguments": "{}"},
    ]
    assert (first.message.model_extra or {})["reasoning_content"] == "let me see"
    assert second.message.tool_calls is None and not second.message.model_extra


def test_whole_result_knows_the_stop_string_that_ended_it() -> None:
    assert [each.stop_sequence for each in results().choices] == [None, "END"]


def test_end_joins_the_text_right_before_it() -> None:
    text, other, end = TextDelta(0, ["a"]), TextDelta(1, ["b"]), Finished(0, "stop")
    cases: list[tuple[Sequence[Event], list[tuple[Event, Finished | None]]]] = [
        ([text, end], [(text, end)]),
        ([text, other, end], [(text, None), (other, None), (end, None)]),
        ([end], [(end, None)]),
        ([other, text], [(other, None), (text, None)]),
    ]
    for events, paired in cases:
        assert list(with_ends(events)) == paired


CUSTOM: list[Event] = [
    ToolCallStart(0, 0, "call_1", "patch", is_custom=True),
    ToolArgumentsDelta(0, 0, '{"input": "a\\n\\u00e'),
    ToolArgumentsDelta(0, 0, '9\\""}'),
    ToolCallEnd(0, 0),
    ToolCallStart(0, 1, "call_2", "patch", is_custom=True),
    ToolArgumentsDelta(0, 1, '{"input": "cut\\ud83d'),
    Finished(0, "length"),
]
INPUTS = ['a\né"', "cut"]


def test_custom_tools_have_their_input_as_text() -> None:
    made = Results()
    for event in CUSTOM:
        made.add(event)
    own = ChatEncoder(context(), has_usage=False, has_logprobs=False)
    message = msgspec.json.decode(b"".join(own.body(made)))["choices"][0]["message"]
    assert message["tool_calls"] == [
        {"id": f"call_{i + 1}", "type": "custom", "custom": {"name": "patch", "input": text}}
        for i, text in enumerate(INPUTS)
    ]


def test_custom_tools_in_a_stream() -> None:
    own = ChatEncoder(context(LINES), has_usage=False, has_logprobs=False)
    encoded = b"".join(part for event in CUSTOM for part in own.events([event]))
    chunks = [msgspec.json.decode(line) for line in encoded.splitlines() if line]
    deltas = [each["choices"][0] for each in chunks]
    calls = [call for each in deltas for call in each["delta"].get("tool_calls", ())]
    for index, text in enumerate(INPUTS):
        head, *rest = [each for each in calls if each["index"] == index]
        assert head["type"] == "custom" and head["custom"] == {"name": "patch", "input": ""}
        assert "".join(each["custom"]["input"] for each in rest) == text
    assert [each["finish_reason"] for each in deltas][-1] == "length"


@pytest.mark.parametrize(
    ("arguments", "expected"), [('{"input": 5}', '{"input": 5}'), ("", ""), ('{"input":"', "")]
)
def test_input_of_arguments(arguments: str, expected: str) -> None:
    assert input_of(arguments) == expected
