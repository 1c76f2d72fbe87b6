"""The turns of a conversation without a dialect, and their conversion to a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from services.gateway.images.input_image import InputImage
from services.gateway.request.prompt import ChatPrompt
from services.gateway.structured.tools.call_fields import CallField, name_and_arguments
from services.gateway.structured.tools.tool import ToolOptions, template_tool
from services.gateway.structured.tools.value_bounds import check_values
from services.gateway.text.chat_template import RESERVED_VARIABLES, TOKEN_VARIABLE
from shared.errors import InvalidRequest

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Role = Literal["system", "user", "assistant", "tool"]


class TextPart(msgspec.Struct, frozen=True, tag=True):
    text: str


ShownPart = TextPart | InputImage


class ToolCall(msgspec.Struct, frozen=True, tag=True):
    """`arguments`: a JSON object as the model wrote it."""

    id: str
    name: str
    arguments: str


class ToolResult(msgspec.Struct, frozen=True, tag=True):
    call_id: str
    parts: tuple[ShownPart, ...]


class Reasoning(msgspec.Struct, frozen=True, tag=True):
    text: str


Part = TextPart | InputImage | ToolCall | ToolResult | Reasoning
Content = str | list[dict[str, str]]  # as chat templates read it


class Turn(msgspec.Struct, frozen=True):
    """`name`: the participant's, for templates that use it."""

    role: Role
    parts: tuple[Part, ...]
    name: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`effort`: None leaves it to the template. `is_shown`: whether the client sees reasoning.
    `max_tokens`: of each choice's reasoning; None: no limit. `max_tokens_param`: the request field
    that is rejected where the model does not mark the end of reasoning; None: nothing is limited
    there.
    """

    effort: Effort | None = None
    is_shown: bool = True
    max_tokens: int | None = None
    max_tokens_param: str | None = None


def chat_prompt(
    turns: Sequence[Turn],
    tools: ToolOptions | None = None,
    *,
    effort: Effort | None = None,
    variables: Mapping[str, Any] | None = None,
    param: str = "messages",
) -> ChatPrompt:
    """Converts the turns to the dicts of chat templates, and joins texts of one that follow each
    other with newlines. A content with images is a list of texts and of their places.
    `variables`: of the client, for the chat template, such as `enable_thinking`. `param`: the
    request field that holds the turns. Raises InvalidRequest for a result without a call before it,
    and for what no model can be given yet.
    """
    names: dict[str, str] = {}  # the called tools' names by the call's id
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        messages += _messages(index, turn, names)
    shown = () if tools is None else tools.shown_tools
    return ChatPrompt(
        tuple(messages),
        images=tuple(images_of(turns)),
        tools=tuple(map(template_tool, shown)),
        variables=template_variables(variables or {}, effort),
        param=param,
    )


def images_of(turns: Sequence[Turn]) -> Iterator[InputImage]:
    """Yields the images in the order of the prompt."""
    for turn in turns:
        for part in turn.parts:
            inner = part.parts if isinstance(part, ToolResult) else (part,)
            yield from (each for each in inner if isinstance(each, InputImage))


def content_of(parts: Sequence[ShownPart]) -> Content:
    """Returns a text, or with images the list of texts and images that templates loop over."""
    if not any(isinstance(each, InputImage) for each in parts):
        return "\n".join(each.text for each in parts if isinstance(each, TextPart))
    content: list[dict[str, str]] = []
    for part in parts:
        if isinstance(part, InputImage):
            content.append({"type": "image"})
        elif content and content[-1]["type"] == "text":
            content[-1]["text"] += "\n" + part.text
        else:
            content.append({"type": "text", "text": part.text})
    return content


def template_variables(variables: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    """Returns the client's variables and those that the effort sets. Raises InvalidRequest for a
    variable that is reserved or contradicts the effort, and PayloadTooLarge.
    """
    field = "chat_template_kwargs"
    check_values([dict(variables)], field)
    for name in variables:
        if name in RESERVED_VARIABLES or name.endswith(TOKEN_VARIABLE) or not name.isidentifier():
            param = f"{field}.{name[:64]}"
            raise InvalidRequest(f"{param}: a request cannot set this variable", param=param)
    of_effort: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":  # templates have two names for it
        of_effort |= {"enable_thinking": False, "thinking": False}
    for name, value in of_effort.items():
        if variables.get(name, value) != value:
            message = f"reasoning_effort {effort!r} and {field}.{name} contradict each other"
            raise InvalidRequest(message, param="reasoning_effort")
    return {**of_effort, **variables}


def tool_calls(fields: Sequence[CallField] | None, index: int) -> tuple[ToolCall, ...]:
    """Returns the calls of message `index`, with an id for each that has none. Raises
    InvalidRequest.
    """
    calls = []
    for position, field in enumerate(fields or ()):
        name, arguments = name_and_arguments(field, f"messages[{index}].tool_calls[{position}]")
        call_id = f"call_{index}_{position}" if field.id is None else field.id
        calls.append(ToolCall(call_id, name, arguments))
    return tuple(calls)


def _messages(index: int, turn: Turn, names: dict[str, str]) -> list[dict[str, Any]]:
    """Converts one turn, and adds its calls to `names`."""
    if any(isinstance(part, ToolResult) for part in turn.parts):
        return [_result(index, turn, part, names) for part in turn.parts]
    shown: list[ShownPart] = []
    calls, reasoning = [], []
    for part in turn.parts:
        match part:
            case TextPart() | InputImage():
                shown.append(part)
            case ToolCall():
                names[part.id] = part.name
                function = {"name": part.name, "arguments": part.arguments}
                calls.append({"id": part.id, "type": "function", "function": function})
            case Reasoning():
                reasoning.append(part.text)
            case _:
                raise _unsupported(index, part)
    message: dict[str, Any] = {"role": turn.role, "content": content_of(shown)}
    if turn.name is not None:
        message["name"] = turn.name
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _result(index: int, turn: Turn, part: Part, names: Mapping[str, str]) -> dict[str, Any]:
    """Converts a result. One without an id belongs to no known call."""
    if not isinstance(part, ToolResult):
        raise _unsupported(index, part)
    message: dict[str, Any] = {"role": "tool", "content": content_of(part.parts)}
    name = turn.name
    if part.call_id:
        if part.call_id not in names:
            param = f"messages[{index}].tool_call_id"
            reason = f"no call before this message has the id {part.call_id[:64]!r}"
            raise InvalidRequest(f"{param}: {reason}", param=param)
        message["tool_call_id"] = part.call_id
        name = names[part.call_id]
    return message if name is None else {**message, "name": name}


def _unsupported(index: int, part: Part) -> InvalidRequest:
    kind = type(part).__name__
    return InvalidRequest(f"a {kind} is not supported", param=f"messages[{index}]")
