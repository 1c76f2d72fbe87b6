"""Content blocks and messages as Anthropic's clients send them. Other fields are ignored, such as
`cache_control`: the cache needs no marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from services.gateway.structured.tools.call_fields import CallId, Name


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str
    """The text."""


class ImageSource(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    """`base64`, or `url` where the operator allows its host; no files are kept."""
    media_type: str | None = None
    """`image/jpeg`, `image/png`, `image/webp` or `image/gif`."""
    data: str | None = None
    """The image in base64."""
    url: str | None = None
    """The address of the image."""


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """An image, for a model that takes some."""

    source: ImageSource
    """The image."""


class AnthropicSource(msgspec.Struct, frozen=True, kw_only=True):
    """The source of a document."""

    type: str
    """The kind of the source: `text` or `content`; others are rejected."""
    data: str | None = None
    """The text of a source of the type `text`."""
    content: str | list[TextBlock] | None = None
    """A text, or blocks of text, of a source of the type `content`."""


class DocumentBlock(msgspec.Struct, frozen=True, tag_field="type", tag="document"):
    source: AnthropicSource
    """The text of the document."""
    title: str | None = None
    """The title, which the model reads before the text."""
    context: str | None = None
    """Remarks about the document, which the model reads before the text."""


class SearchResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="search_result"):
    """A result of the client's own search."""

    source: str
    """Where the result comes from, for example a URL."""
    title: str
    """The title of the result."""
    content: list[TextBlock]
    """The text of the result."""


class ToolReferenceBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_reference"):
    """A tool that a search of the client found."""

    tool_name: str
    """The name of the tool that the client's search found."""


class CompactionBlock(msgspec.Struct, frozen=True, tag_field="type", tag="compaction"):
    """The summary of the turns before it."""

    content: str | None = None
    """The summary; null: the block is left out."""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: CallId
    """The id of the call, which its result repeats."""
    name: Name
    """The name of the called tool."""
    input: dict[str, Any]
    """The arguments of the call."""


class _OfServer(msgspec.Struct, frozen=True, tag_field="type", tag=True):
    """A call that the API's server ran, or its result. Prompts leave it out."""


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
    """The id of the call that this answers."""
    content: ResultContent | None = None
    """The result: a text, or blocks."""
    is_error: bool | None = None
    """Whether the call failed; the model then reads "Error: " before the result."""


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """The thinking of an earlier answer."""

    thinking: str
    """The text of the thinking."""
    signature: str | None = None
    """Not checked, so that a conversation may come from another server."""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Left out: no other server can read it."""

    data: str | None = None
    """Encrypted thinking, which is left out."""


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
    """Who speaks; a `system` message keeps its place in the conversation."""
    content: str | list[Block]
    """A text, or blocks."""


# Of the vendor's server tools, the newer ones too. Any other unknown kind is rejected, as there.
_OF_SERVER = re.compile(r"[a-z0-9_]+_tool_(use|result)")
_KINDS = frozenset(each.__struct_config__.tag for each in get_args(Block))


def leave_out_blocks(body: Any) -> bool:
    """Leaves out of a body the blocks of server tools that are not among ours. Returns whether
    there was one.
    """
    messages = body.get("messages") if isinstance(body, dict) else None
    lists = [each.get("content") for each in _dicts(messages)]
    results = [each.get("content") for blocks in lists for each in _dicts(blocks)]
    foreign = [each for blocks in (*lists, *results) for each in _dicts(blocks) if _is_new(each)]
    for block in foreign:
        block.clear()
        block["type"] = "server_tool_use"
    return bool(foreign)


def _dicts(values: Any) -> Iterator[dict[str, Any]]:
    if isinstance(values, list):
        yield from (each for each in values if isinstance(each, dict))


def _is_new(block: dict[str, Any]) -> bool:
    kind = block.get("type")
    if not isinstance(kind, str) or kind in _KINDS:
        return False
    return _OF_SERVER.fullmatch(kind) is not None


Messages = Annotated[list[AnthropicMessage], Meta(min_length=1)]
SystemField = str | list[TextBlock]
