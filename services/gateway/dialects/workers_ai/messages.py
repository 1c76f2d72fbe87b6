"""The messages of `ai/run`, and their conversion to turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from services.gateway.dialects.openai.content_parts import ContentPart, shown_part
from services.gateway.request.conversation import (
    Reasoning,
    ShownPart,
    TextPart,
    ToolCall,
    ToolResult,
    Turn,
    tool_calls,
)
from services.gateway.request.supported_fields import check_count
from services.gateway.structured.tools.call_fields import CallFields, CallId
from shared.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_PARTS = 1024  # parts of one message
MAX_NAME_CHARS = 128


class RunMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks."""
    content: str | ContentPart | list[ContentPart] | None = None
    """A text, or parts: texts and images; null beside calls."""
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    """The name of the participant, or of the called function in the role `tool`."""
    tool_calls: CallFields | None = None
    """The calls that this message of the assistant made."""
    tool_call_id: CallId | None = None
    """The call whose result this has; without it the message answers the first open call."""
    reasoning_content: str | None = None
    """The thinking of this message of the assistant."""


def turns_of(messages: Sequence[RunMessage]) -> tuple[Turn, ...]:
    """Converts the messages to turns. Raises InvalidRequest and PayloadTooLarge."""
    check_count("messages", len(messages), MAX_MESSAGES)
    open_calls: list[ToolCall] = []
    return tuple(_turn(index, each, open_calls) for index, each in enumerate(messages))


def _turn(index: int, message: RunMessage, open_calls: list[ToolCall]) -> Turn:
    """Converts a message. Adds its calls to the open ones, and removes the call that it answers."""
    place = f"messages[{index}]"
    _check_role(place, message)
    parts = _parts(place, message.content)
    match message.role:
        case "tool":
            call_id = _answered(message, open_calls)
            return Turn("tool", (ToolResult(call_id, parts),), message.name)
        case "assistant":
            calls = tool_calls(message.tool_calls, index)
            open_calls += calls
            thought = message.reasoning_content
            reasoning = (Reasoning(thought),) if thought else ()
            return Turn("assistant", (*reasoning, *parts, *calls), message.name)
        case "developer":
            return Turn("system", parts, message.name)
    return Turn(message.role, parts, message.name)


def _check_role(place: str, message: RunMessage) -> None:
    if message.content is None and message.role != "assistant":
        raise InvalidRequest("content must not be null", param=f"{place}.content")
    if message.tool_calls and message.role != "assistant":
        param = f"{place}.tool_calls"
        raise InvalidRequest(f"{param}: only an assistant has calls", param=param)


def _answered(message: RunMessage, open_calls: list[ToolCall]) -> str:
    """Returns the id of the call that a result answers; empty if the client sent its calls as text,
    as some do.
    """
    if message.tool_call_id is not None:
        open_calls[:] = [each for each in open_calls if each.id != message.tool_call_id]
        return message.tool_call_id
    for call in open_calls:
        if message.name in (None, call.name):
            open_calls.remove(call)
            return call.id
    return ""


def _parts(
    place: str, content: str | ContentPart | list[ContentPart] | None
) -> tuple[ShownPart, ...]:
    match content:
        case None:
            return ()
        case str():
            return (TextPart(content),)
        case ContentPart():
            return (shown_part(f"{place}.content", content),)
    check_count(f"{place}.content", len(content), MAX_PARTS)
    places = ((f"{place}.content[{index}]", each) for index, each in enumerate(content))
    return tuple(shown_part(*each) for each in places)
