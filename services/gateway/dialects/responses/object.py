"""The response object, which repeats the request's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from services.gateway.dialects.openai.usage import HearthInfo
from services.gateway.dialects.responses.fields import (
    CompleteRequest,
    ResponsesReasoning,
    ResponseTool,
    TextFormat,
    TextOptions,
    ToolChoice,
)
from services.gateway.dialects.responses.items import Item, StreamEvent
from services.gateway.dialects.responses.tools import OWN_TYPES
from services.gateway.output import events
from services.gateway.structured.tools.tool_fields import ToolBody, ToolField

Status = Literal["completed", "in_progress", "incomplete", "failed"]
PLAIN_TEXT = TextOptions(format=TextFormat(type="text"))


class ErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    """The exact error, for programs."""
    message: str
    """What is wrong, and what to do."""


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"
    """Why the output was cut."""


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    """Tokens of the prompt that a cache held."""
    cache_write_tokens: int = 0
    """Always 0, as nothing is charged for it."""


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int
    """Tokens of the thinking."""


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    """Tokens of the prompt."""
    input_tokens_details: InputTokensDetails
    """What was cached of them."""
    output_tokens: int
    """Tokens of the output, with its thinking."""
    output_tokens_details: OutputTokensDetails
    """What was thinking of them."""
    total_tokens: int


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response, as it is stored."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Seconds since 1970."""
    completed_at: int | None = None
    """Seconds since 1970; null until the end."""
    status: Status
    """How far the response is."""
    error: ErrorDetails | None = None
    """Why it failed, if it did."""
    incomplete_details: IncompleteDetails | None = None
    """Why the output was cut."""
    instructions: str | None
    """The instructions of the request."""
    metadata: Mapping[str, str]
    """The metadata of the request."""
    model: str
    output: Sequence[Item] = ()
    """Messages, reasoning and calls, in their order."""
    parallel_tool_calls: bool
    """Whether one answer may call several tools."""
    temperature: float | None
    """The temperature of the request; null: the model's."""
    tool_choice: Any
    """Which tools the model may or must call."""
    tools: Sequence[Any]
    """The tools that the model may call."""
    top_p: float | None
    """The share of probability that is sampled from; null: the model's."""
    top_logprobs: int
    """How many of the most likely tokens are reported for each place."""
    max_output_tokens: int | None
    """Most tokens of the output, with its thinking; null: what the context leaves."""
    previous_response_id: str | None
    """The response that this one continues."""
    prompt_cache_key: str | None
    """The key of the request, which has no effect on its answer."""
    safety_identifier: str | None
    """The identifier of the request; nothing reads it."""
    reasoning: ResponsesReasoning
    """How much the model thinks."""
    service_tier: str = "default"
    """Always `default`."""
    store: bool
    """Whether the response is kept."""
    text: TextOptions
    """The form of the text."""
    truncation: Literal["disabled"] = "disabled"
    """Always `disabled`: nothing of a prompt is left out."""
    usage: ResponseUsage | None = None
    """Null until the end."""
    user: str | None
    """The user of the request; nothing reads it."""
    background: bool = False
    """Always false."""
    hearth: HearthInfo | msgspec.UnsetType = msgspec.UNSET
    """The workers that served the response, and warnings."""


class ResponseCreated(StreamEvent, frozen=True, kw_only=True, tag="response.created"):
    """`response`: encoded."""

    response: msgspec.Raw


class ResponseInProgress(StreamEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    """`response`: encoded once, as this event is sent in each silence."""

    response: msgspec.Raw


class ResponseCompleted(StreamEvent, frozen=True, kw_only=True, tag="response.completed"):
    response: ResponseObject


class ResponseIncomplete(StreamEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    response: ResponseObject


class ResponseFailed(StreamEvent, frozen=True, kw_only=True, tag="response.failed"):
    response: ResponseObject


# The events of a stream that have the object; those between have items and texts.
ResponseEvent = (
    ResponseCreated | ResponseInProgress | ResponseCompleted | ResponseIncomplete | ResponseFailed
)


def new_object(
    body: CompleteRequest, *, response_id: str, model: str, created_at: int, is_stored: bool
) -> ResponseObject:
    """Returns the object as it is before the first output."""
    return ResponseObject(
        id=response_id,
        created_at=created_at,
        status="in_progress",
        instructions=body.instructions,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=body.temperature,
        tool_choice=_choice(body.tool_choice),
        tools=[shown for tool in body.tools or () for shown in _shown(tool)],
        top_p=body.top_p,
        top_logprobs=body.top_logprobs or 0,
        max_output_tokens=body.max_output_tokens,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        reasoning=body.reasoning or ResponsesReasoning(),
        store=is_stored,
        text=_text(body.text),
        user=body.user,
    )


def usage_of(usage: events.Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached or 0),
        output_tokens=usage.output,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning),
        total_tokens=usage.prompt + usage.output,
    )


def _text(given: TextOptions | None) -> TextOptions:
    if given is None or given.format is None:
        return msgspec.structs.replace(given or PLAIN_TEXT, format=PLAIN_TEXT.format)
    return given


def _choice(given: str | ToolChoice | None) -> Any:
    if given is None or isinstance(given, str):
        return given or "auto"
    shown = {"type": given.type}
    if given.type == "allowed_tools":
        named = [_without_nulls(each) for each in given.tools or ()]
        return {**shown, "mode": given.mode, "tools": named}
    return {**shown, "name": given.name or ""}


def _shown(tool: ResponseTool) -> list[dict[str, Any]]:
    """Returns a tool as the model is offered it, without its namespace; None for a tool that is
    left out.
    """
    if tool.type == "namespace":
        inner = [_flat(each.type, _body_of(each)) for each in tool.tools or ()]
        description = tool.description or ""
        return [
            {
                "type": "namespace",
                "name": tool.name,
                "description": description,
                "tools": inner,
            }
        ]
    return [_flat(tool.type, _body_of(tool))] if tool.type in OWN_TYPES else []


def _body_of(tool: ResponseTool | ToolField) -> ToolBody:
    inner = tool.custom if tool.type == "custom" else tool.function
    return tool if inner is None else inner


def _flat(kind: str, body: ToolBody) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": kind, "name": body.name}
    if body.description is not None:
        shown["description"] = body.description
    if kind == "function":
        return {**shown, "parameters": body.parameters, "strict": bool(body.strict)}
    given = body.format
    if given is None or given.type == "text":
        return {**shown, "format": {"type": "text"}}
    grammar = given if given.grammar is None else given.grammar
    return {
        **shown,
        "format": {
            "type": "grammar",
            "syntax": grammar.syntax,
            "definition": grammar.definition,
        },
    }


def _without_nulls(given: msgspec.Struct) -> dict[str, Any]:
    return {
        name: value for name, value in msgspec.structs.asdict(given).items() if value is not None
    }
