"""Encodes the tool calls of a chat completion. The input of a custom tool is decoded from its
arguments.
"""

from __future__ import annotations

import json
import re

from services.gateway.dialects.openai.chat import CustomCall, FunctionCall, MessageToolCall
from services.gateway.output.events import ToolArgumentsDelta, ToolCallEnd, ToolCallStart
from services.gateway.output.results import ToolCallResult

_INPUT = re.compile(
    r'\s*\{\s*"input"\s*:\s*"((?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)'
)


def message_tool_call(call: ToolCallResult) -> MessageToolCall:
    if call.is_custom:
        custom = CustomCall(name=call.name, input=input_of(call.arguments))
        return MessageToolCall(id=call.id, type="custom", custom=custom)
    function = FunctionCall(name=call.name, arguments=call.arguments)
    return MessageToolCall(id=call.id, type="function", function=function)


class ToolCallDeltas:
    """Encodes the calls of one choice of a stream. The input of a custom tool is sent when its call
    ends, or the choice.
    """

    def __init__(self) -> None:
        self._custom: dict[int, list[str]] = {}  # arguments that were not sent, by call

    def of(self, event: ToolCallStart | ToolArgumentsDelta | ToolCallEnd) -> MessageToolCall | None:
        """Returns None if nothing is to be sent."""
        match event:
            case ToolCallStart(is_custom=True):
                self._custom[event.index] = []
                custom = CustomCall(name=event.name, input="")
                return MessageToolCall(index=event.index, id=event.id, type="custom", custom=custom)
            case ToolCallStart():
                function = FunctionCall(name=event.name, arguments="")
                return MessageToolCall(
                    index=event.index, id=event.id, type="function", function=function
                )
            case ToolArgumentsDelta() if event.index in self._custom:
                self._custom[event.index].append(event.text)
            case ToolArgumentsDelta():
                function = FunctionCall(arguments=event.text)
                return MessageToolCall(index=event.index, function=function)
            case ToolCallEnd() if event.index in self._custom:
                return self._input(event.index)
        return None

    def rest(self) -> list[MessageToolCall]:
        """Returns the input of a call that has not ended at the end of the choice."""
        return [self._input(index) for index in list(self._custom)]

    def _input(self, index: int) -> MessageToolCall:
        text = input_of("".join(self._custom.pop(index)))
        return MessageToolCall(index=index, custom=CustomCall(input=text))


def input_of(arguments: str) -> str:
    """Returns the text in `{"input": "…"}`, which may be cut, and arguments of another form
    unchanged.
    """
    found = _INPUT.match(arguments)
    if found is None:
        return arguments
    text = json.loads(f'"{found[1]}"')
    assert isinstance(text, str)
    return text.encode(errors="ignore").decode()  # half of a surrogate pair is left out
