"""The response of `ai/run` to a conversation or a prompt.

    {"response": "…", "tool_calls": [{"name", "arguments": {…}}], "usage": {…}, "finish_reason"}

With a `response_format` of JSON, `response` is the value that the text says, and the text where it
is cut. A stream has an event for each text, one for all tool calls, and a last one with `usage`.
Warnings are `messages` of the envelope, and `warnings` of the last event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from services.gateway.dialects.workers_ai.envelope import Success, WorkersAIMessage
from services.gateway.dialects.workers_ai.errors import DialectErrors
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
from services.gateway.output.framing import Framing
from services.gateway.output.results import ChoiceResult, Results, ToolCallResult
from services.gateway.structured.tools.parsing.json_value import json_object
from shared.transport.wire_errors import UNREADABLE

_encode = msgspec.json.Encoder().encode
WARNING_CODE = 1000


class WorkersAIPromptTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class RunUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    # missing if a stop string ended the run before the worker reported the number
    prompt_tokens_details: WorkersAIPromptTokens | None = None


class RunToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments`: an object; a string if the model wrote no JSON."""

    id: str
    name: str
    arguments: Any


class RunFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a run, or an event of its stream, whose `response` is always a text."""

    response: Any
    reasoning_content: str | None = None
    tool_calls: list[RunToolCall] | None = None
    usage: RunUsage | None = None
    finish_reason: str | None = None
    warnings: Sequence[str] = ()  # only in a stream


class TextEvents(Protocol):
    """Encodes one event per text: with padding, or `TextEvent` without."""

    def of(self, texts: Sequence[str]) -> bytes: ...


class RunEncoder(DialectErrors):
    """`warnings`: returns the keywords of a schema that the grammar does not enforce, and what was
    cut, after the output has ended. `is_json`: whether a `response_format` demands JSON.
    """

    def __init__(
        self,
        framing: Framing,
        text_events: TextEvents,
        warnings: Callable[[], Sequence[str]] = tuple,
        *,
        is_json: bool = False,
    ) -> None:
        super().__init__(framing)
        self._warnings = warnings
        self._is_json = is_json
        self._text_events = text_events
        self._calls: list[ToolCallResult] = []
        self._finish_reason = ""

    def keep_alive(self) -> bytes:
        return self._frame()

    def events(self, events: Sequence[Event]) -> Iterator[bytes]:
        for event in events:
            match event:
                case TextDelta():
                    yield self._text_events.of(event.texts)
                case ReasoningDelta():
                    yield self._frame(reasoning_content="".join(event.texts))
                case ToolCallStart():
                    self._calls.append(ToolCallResult(event.id, event.name))
                case ToolArgumentsDelta():
                    self._calls[event.index].arguments += event.text
                case ToolCallEnd():
                    pass
                case Finished():
                    self._finish_reason = event.reason
                case Usage():
                    yield self._ending(event)

    def body(self, results: Results) -> Iterator[bytes]:
        choices = results.choices
        choice = choices[0] if choices else ChoiceResult(0)
        frame = RunFrame(
            response=_value(choice.text) if self._is_json else choice.text,
            reasoning_content=choice.reasoning or None,
            tool_calls=_tool_calls(choice.tool_calls, choice.finish_reason),
            usage=_run_usage(results.usage),
            finish_reason=choice.finish_reason,
        )
        messages = [WorkersAIMessage(WARNING_CODE, each) for each in self._warnings()]
        return iter((_encode(Success(result=frame, messages=messages)),))

    def _ending(self, usage: Usage) -> bytes:
        calls = _tool_calls(self._calls, self._finish_reason)
        before = self._frame(tool_calls=calls) if calls else b""
        last = self._frame(
            usage=_run_usage(usage), finish_reason=self._finish_reason, warnings=self._warnings()
        )
        return before + last

    def _frame(self, **fields: Any) -> bytes:
        return self.framing.event(RunFrame(response="", **fields))


def _run_usage(usage: Usage) -> RunUsage:
    cached = usage.cached
    return RunUsage(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.output,
        total_tokens=usage.prompt + usage.output,
        prompt_tokens_details=None if cached is None else WorkersAIPromptTokens(cached),
    )


def _tool_calls(calls: Sequence[ToolCallResult], finish_reason: str) -> list[RunToolCall] | None:
    """Returns the calls without a last one that `max_tokens` cut: its arguments are not JSON."""
    converted = [
        RunToolCall(id=each.id, name=each.name, arguments=_arguments(each.arguments))
        for each in calls
    ]
    if finish_reason == "length" and converted and isinstance(converted[-1].arguments, str):
        converted.pop()
    return converted or None


def _arguments(text: str) -> Any:
    found = json_object(text or "{}")
    return text if found is None else found


def _value(text: str) -> Any:
    """Returns the JSON value, or the text itself if it was cut."""
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        return text
