"""Content blocks and messages as Anthropic's clients send them. Other fields are ignored, such as
`cache_control`: the cache needs no marks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.structured.tools.call_fields import CallId, Name


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """Always rejected: no model has vision yet."""

    source: Any = None


class AnthropicSource(msgspec.Struct, frozen=True, kw_only=True):
    """Of a document. `data`: of the type `text`; `content`: of the type `content`."""

    type: str
    data: str | None = None
    content: str | list[TextBlock] | None = None


class DocumentBlock(msgspec.Struct, frozen=True, tag_field="type", tag="document"):
    source: AnthropicSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="search_result"):
    """Of the client's own search."""

    source: str
    title: str
    content: list[TextBlock]


class ToolReferenceBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_reference"):
    """A tool that a search of the client found."""

    tool_name: str


class CompactionBlock(msgspec.Struct, frozen=True, tag_field="type", tag="compaction"):
    """The summary of the turns before it."""

    content: str | None = None


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: CallId
    name: Name
    input: dict[str, Any]


class _OfServer(msgspec.Struct, frozen=True, tag_field="type", tag=True):
    """What a server ran, and tells the model by itself: it is left out."""


class ServerToolUse(_OfServer, frozen=True, tag="server_tool_use"): ...


class WebSearchResult(_OfServer, frozen=True, tag="web_search_tool_result"): ...


class WebFetchResult(_OfServer, frozen=True, tag="web_fetch_tool_result"): ...


class CodeExecutionResult(_OfServer, frozen=True, tag="code_execution_tool_result"): ...


class BashResult(_OfServer, frozen=True, tag="bash_code_execution_tool_result"): ...


class TextEditorResult(_OfServer, frozen=True, tag="text_editor_code_execution_tool_result"): ...


class ToolSearchResult(_OfServer, frozen=True, tag="tool_search_tool_result"): ...


class AdvisorResult(_OfServer, frozen=True, tag="advisor_tool_result"): ...


class McpToolUse(_OfServer, frozen=True, tag="mcp_tool_use"): ...


class McpToolResult(_OfServer, frozen=True, tag="mcp_tool_result"): ...


class ContainerUpload(_OfServer, frozen=True, tag="container_upload"): ...


class Fallback(_OfServer, frozen=True, tag="fallback"): ...


OfServer = (
    ServerToolUse
    | WebSearchResult
    | WebFetchResult
    | CodeExecutionResult
    | BashResult
    | TextEditorResult
    | ToolSearchResult
    | AdvisorResult
    | McpToolUse
    | McpToolResult
    | ContainerUpload
    | Fallback
)
ResultBlock = (
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | OfServer
)
ResultContent = str | list[ResultBlock]


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
    | SearchResultBlock
    | ToolReferenceBlock
    | CompactionBlock
    | OfServer
)


class AnthropicMessage(msgspec.Struct, frozen=True):
    """A `system` message is among the others, unlike the field of that name."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


Messages = Annotated[list[AnthropicMessage], Meta(min_length=1)]
SystemField = str | list[TextBlock]
