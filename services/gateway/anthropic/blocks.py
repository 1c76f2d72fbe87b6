"""Content blocks and messages as Anthropic's clients send them. Other fields are ignored, such as
`cache_control`: the cache needs no marks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.tools.call_fields import CallId, Name


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """Always rejected: no model has vision yet."""

    source: Any = None


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Of a document. `data`: of the type `text`; `content`: of the type `content`."""

    type: str
    data: str | None = None
    content: str | list[TextBlock] | None = None


class DocumentBlock(msgspec.Struct, frozen=True, tag_field="type", tag="document"):
    source: Source
    title: str | None = None
    context: str | None = None


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: CallId
    name: Name
    input: dict[str, Any]


ResultContent = str | list[TextBlock | ImageBlock | DocumentBlock]


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: CallId
    content: ResultContent | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """`signature`: not checked, so that a conversation may come from another server."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Left out: no other server can read it."""

    data: str | None = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)


class Message(msgspec.Struct, frozen=True):
    """A `system` message is among the others, unlike the field of that name."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


Messages = Annotated[list[Message], Meta(min_length=1)]
SystemField = str | list[TextBlock]
