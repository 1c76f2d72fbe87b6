"""OpenAI's chat completions: the types of the dialect, and their meaning in Hearth's terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.body import SupportedFields
from services.gateway.delivery import Delivery
from services.gateway.generation import Generation
from shared.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256  # bounds the work for each piece of text
MAX_STOP_TOKEN_IDS = 64

# Fields that would change the answer and that Hearth does not serve, with the values that ask for
# nothing. Any other unknown field is ignored, as clients send many.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None, "none"),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None,),
    "web_search_options": (None,),
}


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None  # only null or empty


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False


class ChatCompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None  # the gateway's only model
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    user: str | None = None
    cache_salt: str | None = None


CHAT_FIELDS = SupportedFields(ChatCompletionRequest, NEUTRAL_VALUES)


def generation_of(body: ChatCompletionRequest, default_model: str) -> Generation:
    """Raises InvalidRequest where fields contradict each other."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    return Generation(
        model=default_model if body.model is None else body.model,
        messages=tuple(_message(index, each) for index, each in enumerate(body.messages)),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        max_tokens=_max_tokens(body),
        min_tokens=0 if body.min_tokens is None else body.min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop=_stop_strings(body.stop),
        stop_token_ids=() if body.stop_token_ids is None else tuple(body.stop_token_ids),
        cache_salt="" if body.cache_salt is None else body.cache_salt,
    )


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if content is None and message.role != "assistant":
        raise InvalidRequest("content must not be null", param=f"messages[{index}].content")
    if message.tool_calls:
        raise InvalidRequest("tool calls are not supported", param=f"messages[{index}].tool_calls")
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": "" if content is None else content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequest(
            "max_tokens and max_completion_tokens contradict each other", param="max_tokens"
        )
    return body.max_completion_tokens


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in strings:
        raise InvalidRequest("a stop string must not be empty", param="stop")
    if any(len(each) > MAX_STOP_CHARS for each in strings):
        message = f"a stop string must not be longer than {MAX_STOP_CHARS} characters"
        raise InvalidRequest(message, param="stop")
    return strings


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    # null when a stop string ended the worker's run before it could tell
    prompt_tokens_details: PromptTokensDetails | None


class HearthInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who served a request, beside OpenAI's fields."""

    request_id: str
    decode_worker: str | None
    prefill_worker: str | None
    num_pushed_tokens: int | None
    num_preemptions: int | None
    num_resubmissions: int


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: str | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    hearth: HearthInfo


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChunkChoice]
    usage: Usage | None = None
    hearth: HearthInfo | None = None


def usage_of(delivery: Delivery) -> Usage:
    num_cached = delivery.num_cached_tokens
    return Usage(
        prompt_tokens=delivery.num_prompt_tokens,
        completion_tokens=delivery.num_output_tokens,
        total_tokens=delivery.num_prompt_tokens + delivery.num_output_tokens,
        prompt_tokens_details=None if num_cached is None else PromptTokensDetails(num_cached),
    )


def hearth_info_of(delivery: Delivery) -> HearthInfo:
    served, end = delivery.served, delivery.end
    return HearthInfo(
        request_id=delivery.request_id,
        decode_worker=None if end is None else end.worker_id,
        prefill_worker=None if served is None else served.prefill_worker_id,
        num_pushed_tokens=None if served is None else served.num_pushed_tokens,
        num_preemptions=None if served is None else served.num_preemptions,
        num_resubmissions=0 if end is None else end.num_resubmissions,
    )
