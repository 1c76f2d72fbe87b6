"""The messages of OpenAI's chat completions, and their conversion to turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from services.gateway.dialects.openai.content_parts import ContentPart, shown_part
from services.gateway.request.conversation import (
    Part,
    Reasoning,
    ShownPart,
    TextPart,
    ToolCall,
    ToolResult,
    Turn,
    tool_calls,
)
from services.gateway.request.supported_fields import check_count
from services.gateway.structured.tools.call_fields import (
    CalledFunction,
    CallField,
    CallFields,
    CallId,
    name_and_arguments,
)
from shared.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_PARTS = 1024  # parts of one message
MAX_NAME_CHARS = 128


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """Who speaks; `developer` is `system`, and `function` the older form of `tool`."""
    content: str | list[ContentPart] | None = None
    """A text, or parts: texts and images; null beside calls."""
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    """The name of the participant, or of the function in the role `function`."""
    tool_calls: CallFields | None = None
    """The calls that this message of the assistant made."""
    tool_call_id: CallId | None = None
    """The call whose result this message of the role `tool` has."""
    function_call: CalledFunction | None = None
    """The older form of one call in `tool_calls`."""
    reasoning_content: str | None = None
    """The thinking of this message of the assistant, for templates that show it again."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    refusal: str | None = None
    """The refusal of this message of the assistant, read as its text."""


def turns_of(messages: Sequence[ChatMessage]) -> tuple[Turn, ...]:
    """Converts the messages to turns. Raises InvalidRequest and PayloadTooLarge."""
    check_count("messages", len(messages), MAX_MESSAGES)
    return tuple(_turn(index, each) for index, each in enumerate(messages))


def _turn(index: int, message: ChatMessage) -> Turn:
    place = f"messages[{index}]"
    _check_role(place, message)
    parts = _parts(place, message)
    match message.role:
        case "tool":
            assert message.tool_call_id is not None, "checked before"
            return Turn("tool", (ToolResult(message.tool_call_id, parts),), message.name)
        case "function":
            return Turn("tool", (ToolResult(_function_id(message.name or ""), parts),))
        case "assistant":
            return Turn("assistant", _answer(index, message, parts), message.name)
        case "developer":
            return Turn("system", parts, message.name)
    return Turn(message.role, parts, message.name)


def _check_role(place: str, message: ChatMessage) -> None:
    """Raises InvalidRequest for a field of another role, or if a required field is missing."""
    role = message.role
    if message.content is None and role != "assistant":
        raise InvalidRequest("content must not be null", param=f"{place}.content")
    for name in ("tool_calls", "function_call"):
        if getattr(message, name) and role != "assistant":
            param = f"{place}.{name}"
            raise InvalidRequest(f"{param}: a message of role {role!r} has no calls", param=param)
    if role == "function" and message.name is None:
        param = f"{place}.name"
        raise InvalidRequest(f"{param}: the result of a function needs its name", param=param)
    param = f"{place}.tool_call_id"
    if role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{param}: a result needs the id of its call", param=param)
    if role != "tool" and message.tool_call_id is not None:
        raise InvalidRequest(f"{param}: only a message of role 'tool' has it", param=param)


def _answer(index: int, message: ChatMessage, shown: tuple[ShownPart, ...]) -> tuple[Part, ...]:
    for position, call in enumerate(message.tool_calls or ()):
        if call.id is None:
            param = f"messages[{index}].tool_calls[{position}].id"
            raise InvalidRequest(f"{param}: a call needs an id", param=param)
    thought = message.reasoning_content or message.reasoning
    reasoning = (Reasoning(thought),) if thought else ()
    refusal = (TextPart(message.refusal),) if message.refusal else ()
    calls = tool_calls(message.tool_calls, index)
    if message.function_call is not None:
        place = f"messages[{index}].function_call"
        name, arguments = name_and_arguments(CallField(function=message.function_call), place)
        calls += (ToolCall(_function_id(name), name, arguments),)
    return (*reasoning, *shown, *refusal, *calls)


def _function_id(name: str) -> str:
    """Returns the id of a call in the older form: a function has one open call."""
    return f"call_{name}"


def _parts(place: str, message: ChatMessage) -> tuple[ShownPart, ...]:
    content = message.content
    if isinstance(content, list):
        check_count(f"{place}.content", len(content), MAX_PARTS)
        return tuple(
            shown_part(f"{place}.content[{index}]", part) for index, part in enumerate(content)
        )
    return () if content is None else (TextPart(content),)
