"""The token usage and the processes that served a response, for all dialects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec
from msgspec import Struct

from services.gateway.output import events
from services.gateway.request.endpoint import ResponseContext

T = TypeVar("T")


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    """Tokens of the prompt that a cache held, so that they were not computed again."""


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int
    """Tokens of the output that are thinking."""


class OpenAIUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    """Tokens of the output, with its thinking."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    """Null if a stop string ended the run before the worker reported the number."""
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """Missing without reasoning."""


class HearthInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Details beside the fields of the API. Of several prompts: sums; a worker that served them
    all.
    """

    request_id: str
    """The id of the request in logs, traces and its timeline."""
    decode_worker: str | None
    """The worker that generated the output; null if several did."""
    prefill_worker: str | None
    """The worker that computed the prompt and pushed its KV; null if the decode worker did."""
    num_pushed_tokens: int | None
    """Tokens whose KV moved from the prefill to the decode worker."""
    num_preemptions: int | None
    """How often the request gave its memory to others and was computed again."""
    num_resubmissions: int
    """How often the request went on elsewhere after the loss of a worker."""
    warnings: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """What was not enforced, was cut, or is unknown; missing if there is nothing."""


def to_usage(usage: events.Usage) -> OpenAIUsage:
    cached, reasoning = usage.cached, usage.reasoning
    return OpenAIUsage(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.output,
        total_tokens=usage.prompt + usage.output,
        prompt_tokens_details=None if cached is None else PromptTokensDetails(cached),
        completion_tokens_details=(
            CompletionTokensDetails(reasoning) if reasoning else msgspec.UNSET
        ),
    )


def usage_so_far(
    context: ResponseContext, *, is_asked: bool, is_running: bool
) -> OpenAIUsage | msgspec.UnsetType | None:
    """Returns the usage of a chunk before the last one: null if the client asks for usage, or with
    `is_running` the usage so far.
    """
    if is_running:
        return to_usage(context.merger.usage)
    return None if is_asked else msgspec.UNSET


def hearth_info_of(context: ResponseContext) -> HearthInfo:
    outputs = context.merger.outputs
    ends = [each.end for each in outputs]
    served = [each.served for each in outputs]
    return HearthInfo(
        request_id=context.request_id,
        decode_worker=_same(None if each is None else each.worker_id for each in ends),
        prefill_worker=_same(None if each is None else each.prefill_worker_id for each in served),
        num_pushed_tokens=_sum(None if each is None else each.num_pushed_tokens for each in served),
        num_preemptions=_sum(None if each is None else each.num_preemptions for each in served),
        num_resubmissions=sum(0 if each is None else each.num_resubmissions for each in ends),
        warnings=context.merger.warnings or msgspec.UNSET,
    )


def ending(context: ResponseContext, usage: Struct | None, empty: Struct) -> bytes:
    """Returns what follows the last choice of a stream: the chunk with the `usage` if the client
    requests it, else the warnings in the `empty` chunk, whose choice such clients expect.
    """
    if usage is None and not context.merger.warnings:
        return b""
    chunk = empty if usage is None else usage
    return context.framing.event(msgspec.structs.replace(chunk, hearth=hearth_info_of(context)))


def _sum(numbers: Iterable[int | None]) -> int | None:
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _same(values: Iterable[T]) -> T | None:
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else None
