"""The token usage and the serving processes of a response, for all dialects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from services.gateway.request.request_output import RequestOutput

T = TypeVar("T")


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    # null if a stop string ended the run before the worker reported the number
    prompt_tokens_details: PromptTokensDetails | None


class HearthInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Details beside OpenAI's fields. Of several prompts: sums; a worker that served them all."""

    request_id: str
    decode_worker: str | None
    prefill_worker: str | None
    num_pushed_tokens: int | None
    num_preemptions: int | None
    num_resubmissions: int


def to_usage(outputs: Sequence[RequestOutput]) -> Usage:
    """Counts each prompt once, however many choices it has, and every sampled choice."""
    num_prompt = sum(each.num_prompt_tokens for each in outputs)
    num_output = sum(each.num_output_tokens for each in outputs)
    num_cached = _sum(each.num_cached_tokens for each in outputs)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=None if num_cached is None else PromptTokensDetails(num_cached),
    )


def hearth_info_of(request_id: str, outputs: Sequence[RequestOutput]) -> HearthInfo:
    ends = [each.end for each in outputs]
    served = [each.served for each in outputs]
    return HearthInfo(
        request_id=request_id,
        decode_worker=_same(None if each is None else each.worker_id for each in ends),
        prefill_worker=_same(None if each is None else each.prefill_worker_id for each in served),
        num_pushed_tokens=_sum(None if each is None else each.num_pushed_tokens for each in served),
        num_preemptions=_sum(None if each is None else each.num_preemptions for each in served),
        num_resubmissions=sum(0 if each is None else each.num_resubmissions for each in ends),
    )


def _sum(numbers: Iterable[int | None]) -> int | None:
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _same(values: Iterable[T]) -> T | None:
    first, *others = dict.fromkeys(values)
    return None if others else first
