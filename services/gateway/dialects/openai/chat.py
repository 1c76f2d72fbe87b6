"""The types of OpenAI's chat completions, and the conversion to a GenerationRequest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from services.gateway.dialects.openai.logprobs import ChatLogprobs
from services.gateway.dialects.openai.messages import ChatMessage, turns_of
from services.gateway.dialects.openai.request_fields import (
    NEUTRAL_VALUES,
    RequestFields,
    check_stream_options,
)
from services.gateway.dialects.openai.usage import HearthInfo, OpenAIUsage
from services.gateway.request.conversation import (
    Effort,
    ReasoningOptions,
    chat_prompt,
)
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.sampling import MAX_LOGPROBS, Limit, SamplingFields
from services.gateway.request.supported_fields import SupportedFields
from services.gateway.structured.grammars.constraint_fields import constraint_of
from services.gateway.structured.tools.choice_fields import ToolChoiceField, tool_options
from services.gateway.structured.tools.tool_fields import ToolFields
from shared.errors import InvalidRequest

CHAT_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **{name: each for name, each in NEUTRAL_VALUES.items() if name != "thinking_token_budget"},
    "echo": (None, False),
}


class ChatCompletionRequest(RequestFields, frozen=True, kw_only=True):
    """A conversation to answer."""

    LIMITS: ClassVar[tuple[str, ...]] = (
        *SamplingFields.LIMITS,
        *("max_tokens", "max_completion_tokens", "thinking_token_budget"),
    )
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    """The conversation so far."""
    max_tokens: Limit | None = None
    """Most tokens of the output, cut to the room that the prompt leaves in the context."""
    max_completion_tokens: Limit | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Whether the response has the log probability of each output token."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """How many of the most likely tokens are reported for each place; needs `logprobs`."""
    tools: ToolFields | None = None
    """The tools that the model may call."""
    tool_choice: ToolChoiceField | None = None
    """Which tools the model may or must call: `auto`, `none`, `required`, one tool, or
    `allowed_tools`.
    """
    parallel_tool_calls: bool | None = None
    """Whether one answer may call several tools; by default true."""
    reasoning_effort: Effort | None = None
    """How much the model thinks, as its chat template understands it; `none` turns thinking off."""
    include_reasoning: bool | None = None
    """Whether the response has the reasoning; by default true."""
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
    """Most tokens of thinking, after which the thinking is ended; at most `max_tokens`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template, such as `enable_thinking`."""


CHAT_FIELDS = SupportedFields(ChatCompletionRequest, CHAT_NEUTRAL_VALUES)


def to_generation_request(body: ChatCompletionRequest, default_model: str) -> GenerationRequest:
    """Returns one request. Raises InvalidRequest if fields contradict each other."""
    if body.best_of not in (None, 1, body.num_choices):
        raise InvalidRequest("best_of is for text completions", param="best_of")
    check_stream_options(body)
    turns = turns_of(body.messages)
    tools = tool_options(body.tools, body.tool_choice, body.parallel_tool_calls)
    output, effort = constraint_of(body), body.reasoning_effort
    return GenerationRequest(
        model=body.model or default_model,
        prompt=chat_prompt(turns, tools, effort=effort, variables=body.chat_template_kwargs),
        sampling=body,
        max_tokens=_max_tokens(body),
        max_tokens_param=(
            "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        ),
        num_logprobs=_num_logprobs(body),
        logprobs_param="top_logprobs" if body.top_logprobs else "logprobs",
        num_choices=body.num_choices,
        cache_salt="" if body.cache_salt is None else body.cache_salt,
        affinity_key=body.prompt_cache_key or "",
        priority=body.priority,
        tools=tools,
        reasoning=ReasoningOptions(
            effort=effort,
            is_shown=body.include_reasoning is not False,
            max_tokens=body.thinking_token_budget,
            max_tokens_param="thinking_token_budget",
        ),
        output=output,
    )


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequest(
            "max_tokens and max_completion_tokens contradict each other", param="max_tokens"
        )
    return body.max_completion_tokens


def _num_logprobs(body: ChatCompletionRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    return 0 if body.top_logprobs is None else body.top_logprobs


# ── responses ────────────────────────────────────────────────────────────────────────────────────


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str | None = None
    """The name of the function; in a stream only in the first delta."""
    arguments: str
    """A JSON object as text, or a part of it in a stream."""


class CustomCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str | None = None
    """The name of the tool; in a stream only in the first delta."""
    input: str
    """The text for the tool, or a part of it in a stream."""


class MessageToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call of a function or of a custom tool."""

    index: int | None = None
    """The place of the call among those of the answer; only in a stream."""
    id: str | None = None
    """The id that the message with the result repeats; in a stream only in the first delta."""
    type: Literal["function", "custom"] | None = None
    """Which of the two it is; in a stream only in the first delta."""
    function: FunctionCall | None = None
    """The call of a function."""
    custom: CustomCall | None = None
    """The call of a custom tool."""


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Reasoning has two names, since clients read either."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """The text of the answer; null beside calls alone."""
    refusal: str | None = None
    """Always null."""
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """The thinking before the answer, if the model thinks."""
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """The same as `reasoning_content`, under the name that other clients read."""
    tool_calls: list[MessageToolCall] | msgspec.UnsetType = msgspec.UNSET
    """The calls of tools, if there are any."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """The place of the answer among those of the request, from 0."""
    message: AssistantMessage
    """The answer."""
    finish_reason: str
    """Why the output ended: `stop`, `length` or `tool_calls`."""
    logprobs: ChatLogprobs | None = None
    """Log probabilities, if they were asked for."""


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """When the request arrived, in seconds since 1970."""
    model: str
    choices: list[ChatChoice]
    """The answers."""
    usage: OpenAIUsage
    hearth: HearthInfo


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    """Who speaks; in the first chunk alone."""
    content: str | None = None
    """The next part of the text."""
    reasoning_content: str | None = None
    """The next part of the thinking."""
    reasoning: str | None = None
    """The same as `reasoning_content`, under the name that other clients read."""
    tool_calls: list[MessageToolCall] | None = None
    """Calls, or the next parts of their arguments."""


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """The place of the answer among those of the request, from 0."""
    delta: Delta
    """What the chunk adds to the answer."""
    finish_reason: str | None = None
    """Why the output ended; in the last chunk of an answer alone."""
    logprobs: ChatLogprobs | None = None
    """Log probabilities of the tokens of this chunk, if they were asked for."""


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChunkChoice]
    """Parts of the answers; empty in the chunk of the usage."""
    usage: OpenAIUsage | msgspec.UnsetType | None = msgspec.UNSET
    """Null before the last chunk; missing if it was not asked for."""
    hearth: HearthInfo | None = None
