"""The types of a response, and of the events of its stream."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    """Tokens of the prompt that were computed; with those read from a cache they are the prompt."""
    cache_creation_input_tokens: int = 0
    """Always 0, as nothing is charged for it."""
    cache_read_input_tokens: int
    """Tokens of the prompt that a cache held."""
    output_tokens: int
    """Tokens of the output, with its thinking."""


class AnthropicText(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str
    """The text."""


class AnthropicThinking(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    """The thinking before the answer."""
    signature: str
    """Signed for the tenant; nothing checks it."""


class ToolUse(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    """The id that the block with the result repeats."""
    name: str
    """The name of the tool."""
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
    """The arguments."""


Content = AnthropicText | AnthropicThinking | ToolUse


class HearthWarnings(msgspec.Struct, frozen=True):
    warnings: tuple[str, ...]
    """What was not enforced, was left out, or is unknown."""


class MessageResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    type: Literal["message"] = "message"
    """Always `message`."""
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    """Texts, thinking and calls, in their order."""
    stop_reason: StopReason | None
    """Why the output ended."""
    stop_sequence: str | None
    """The stop sequence that matched, if one did."""
    usage: AnthropicUsage
    hearth: HearthWarnings | msgspec.UnsetType = msgspec.UNSET
    """Missing without warnings."""


class AnthropicTextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str
    """The next part of the text."""


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str
    """The next part of the thinking."""


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str
    """The signature of the thinking."""


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str
    """The next part of the arguments, as JSON text."""


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageResponse
    """The answer, which is empty yet."""


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    """The place of the block in the answer, from 0."""
    content_block: Content
    """The block, which is empty yet."""


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    """The place of the block in the answer, from 0."""
    delta: AnthropicTextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta
    """The next part of the block."""


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int
    """The place of the block that is complete."""


class AnthropicStop(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    """Why the output ended."""
    stop_sequence: str | None
    """The stop sequence that matched, if one did."""


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: AnthropicStop
    """How the answer ended."""
    usage: AnthropicUsage
    hearth: HearthWarnings | msgspec.UnsetType = msgspec.UNSET
    """Missing without warnings."""


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


class AnthropicPing(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    pass


StreamEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | AnthropicPing
)


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int
    """Tokens of the prompt."""
