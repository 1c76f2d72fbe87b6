"""The items of a response's output, and the events of its stream."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.gateway.dialects.openai.logprobs import ContentLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    """The text."""
    annotations: tuple[str, ...] = ()
    """Always empty."""
    logprobs: list[ContentLogprob] = msgspec.field(default_factory=list)
    """One entry for each token, if they were asked for."""


class ReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    text: str
    """The thinking."""


class ResponsesMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    """How far the item is."""
    content: tuple[OutputText, ...]
    """The texts."""


class ResponsesFunctionCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    id: str
    call_id: str
    """The id that the item with the result repeats."""
    name: str
    """The name of the function."""
    arguments: str
    """A JSON object as text."""
    status: ItemStatus
    """How far the item is."""
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    """The namespace of the function, if it has one."""


class ResponsesCustomCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    id: str
    call_id: str
    """The id that the item with the result repeats."""
    name: str
    """The name of the tool."""
    input: str
    """The text for the tool."""
    status: ItemStatus
    """How far the item is."""
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    """The namespace of the tool, if it has one."""


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: tuple[str, ...] = ()
    """Always empty."""
    content: tuple[ReasoningText, ...] = ()
    """The thinking."""
    encrypted_content: str | None = None
    """The thinking, sealed, if it was asked for."""
    status: ItemStatus
    """How far the item is."""


Item = ResponsesMessage | ResponsesFunctionCall | ResponsesCustomCall | ReasoningItem


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """`sequence_number`: counts the events of a stream from 0."""

    sequence_number: int


class ItemAdded(StreamEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(StreamEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: Item


class ItemEvent(StreamEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class ContentEvent(ItemEvent, frozen=True, kw_only=True):
    content_index: int = 0


class PartAdded(ContentEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText


class PartDone(ContentEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText


class ResponsesTextDelta(ContentEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    logprobs: list[ContentLogprob]
    delta: str


class TextDone(ContentEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ContentLogprob]


class ResponsesReasoningDelta(
    ContentEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"
):
    delta: str


class ReasoningDone(ContentEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(
    ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class ArgumentsDone(
    ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


class InputDelta(ItemEvent, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(ItemEvent, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


def name_of(event: StreamEvent) -> str:
    """Returns the `type` of an event."""
    tag = event.__struct_config__.tag
    assert isinstance(tag, str)
    return tag
