"""A conversation without a dialect: what every dialect of chat requests is converted to."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from services.gateway.grammars.constraint import OutputConstraint
from services.gateway.request.prompt import ChatPrompt
from services.gateway.request.sampling import SamplingFields
from services.gateway.tools.tool import ToolOptions
from shared.errors import InvalidRequest

Role = Literal["system", "user", "assistant", "tool"]


class TextPart(msgspec.Struct, frozen=True, tag=True):
    text: str


class ImagePart(msgspec.Struct, frozen=True, tag=True):
    url: str  # also a data URL


class ToolCall(msgspec.Struct, frozen=True, tag=True):
    """`arguments`: a JSON object, as the model wrote it."""

    id: str
    name: str
    arguments: str


class ToolResult(msgspec.Struct, frozen=True, tag=True):
    call_id: str
    text: str


class Reasoning(msgspec.Struct, frozen=True, tag=True):
    text: str


Part = TextPart | ImagePart | ToolCall | ToolResult | Reasoning


class Turn(msgspec.Struct, frozen=True):
    """`name`: of the participant, for templates that use it."""

    role: Role
    parts: tuple[Part, ...]
    name: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`effort`: None leaves it to the template. `is_shown`: whether the client sees reasoning."""

    effort: str | None = None
    is_shown: bool = True


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    turns: tuple[Turn, ...]
    tools: ToolOptions | None = None
    output: OutputConstraint | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    sampling: SamplingFields = SamplingFields()


def chat_prompt(conversation: Conversation) -> ChatPrompt:
    """Converts the turns to the dicts of chat templates, and joins the parts of each with newlines.
    Raises InvalidRequest for what no model can be given yet.
    """
    if conversation.tools is not None:
        raise InvalidRequest("tools are not supported", param="tools")
    turns = enumerate(conversation.turns)
    return ChatPrompt(tuple(_message(index, turn) for index, turn in turns))


def _message(index: int, turn: Turn) -> dict[str, Any]:
    texts = []
    for part in turn.parts:
        if not isinstance(part, TextPart):
            kind = type(part).__name__
            raise InvalidRequest(f"a {kind} is not supported", param=f"messages[{index}]")
        texts.append(part.text)
    message: dict[str, Any] = {"role": turn.role, "content": "\n".join(texts)}
    if turn.name is not None:
        message["name"] = turn.name
    return message
