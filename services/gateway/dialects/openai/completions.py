"""The types of OpenAI's text completions, and the conversion of a request to GenerationRequests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from services.gateway.dialects.openai.logprobs import CompletionLogprobs
from services.gateway.dialects.openai.prompts import Prompts, to_prompts
from services.gateway.dialects.openai.request_fields import (
    NEUTRAL_VALUES,
    RequestFields,
    check_stream_options,
)
from services.gateway.dialects.openai.usage import HearthInfo, OpenAIUsage
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.sampling import MAX_LOGPROBS, SamplingFields
from services.gateway.request.supported_fields import SupportedFields
from services.gateway.structured.grammars.constraint_fields import constraint_of
from shared.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 16
MAX_ALL_CHOICES = 1024  # over all prompts

COMPLETION_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES,
    "chat_template_kwargs": (None, {}),
    "max_completion_tokens": (None,),
    "reasoning_effort": (None, "none"),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}


class CompletionRequest(RequestFields, frozen=True, kw_only=True):
    """Prompts to continue."""

    LIMITS: ClassVar[tuple[str, ...]] = (*SamplingFields.LIMITS, "max_tokens")
    prompt: Prompts
    """A text, a list of tokens, or a list of either; each prompt has its own choices."""
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """Most tokens of the output, cut to the room in the context; 0 with `echo` only scores the
    prompt.
    """
    echo: bool | None = None
    """Whether the output begins with the prompt."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """How many of the most likely tokens are reported for each place."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens around the text; by default true."""


COMPLETION_FIELDS = SupportedFields(CompletionRequest, COMPLETION_NEUTRAL_VALUES)


def to_generation_requests(body: CompletionRequest, default_model: str) -> list[GenerationRequest]:
    """Returns one request per prompt. Raises InvalidRequest if fields contradict each other."""
    add_special_tokens = body.add_special_tokens is not False
    prompts = to_prompts("prompt", body.prompt, add_special_tokens=add_special_tokens)
    num_choices = num_sampled(body)
    if len(prompts) * num_choices > MAX_ALL_CHOICES:
        message = f"{len(prompts)} prompts with {num_choices} choices each exceed "
        raise InvalidRequest(f"{message}{MAX_ALL_CHOICES} choices", param="n")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens=0 requires echo to be true", param="max_tokens")
    check_stream_options(body)
    output = constraint_of(body)
    if output is not None and num_choices > body.num_choices:
        raise InvalidRequest(f"best_of and {output.param} exclude each other", param="best_of")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return [
        GenerationRequest(
            model=body.model or default_model,
            prompt=prompt,
            sampling=body,
            max_tokens=max(max_tokens, 1),  # a worker samples at least one
            num_logprobs=_num_logprobs(body),
            num_prompt_logprobs=body.logprobs if body.echo else None,
            num_choices=num_choices,
            cache_salt="" if body.cache_salt is None else body.cache_salt,
            affinity_key=body.prompt_cache_key or "",
            priority=body.priority,
            has_echo=bool(body.echo),
            shows_output=body.max_tokens != 0,
            output=output,
        )
        for prompt in prompts
    ]


def num_sampled(body: CompletionRequest) -> int:
    """Returns the number of choices to sample per prompt, of which `n` are returned."""
    best_of = body.num_choices if body.best_of is None else body.best_of
    if best_of < body.num_choices:
        raise InvalidRequest("best_of must not be less than n", param="best_of")
    if best_of > body.num_choices and body.stream:
        raise InvalidRequest("best_of cannot be streamed", param="best_of")
    return best_of


def _num_logprobs(body: CompletionRequest) -> int | None:
    if body.logprobs is None and num_sampled(body) > body.num_choices:
        return 0  # `best_of` ranks choices by their logprobs
    return body.logprobs


# ── responses ────────────────────────────────────────────────────────────────────────────────────


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The same in full responses and in chunks; only the last chunk has a `finish_reason`."""

    index: int
    """The place of the text among those of the request, from 0."""
    text: str
    """The text, or the next part of it."""
    logprobs: CompletionLogprobs | None = None
    """Log probabilities, if they were asked for."""
    finish_reason: str | None = None
    """Why the output ended: `stop` or `length`."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    """The texts."""
    usage: OpenAIUsage
    hearth: HearthInfo


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    """Parts of the texts; empty in the chunk of the usage."""
    usage: OpenAIUsage | msgspec.UnsetType | None = msgspec.UNSET
    """Null before the last chunk; missing if it was not asked for."""
    hearth: HearthInfo | None = None
