"""How a caller wants tokens drawn, free of any HTTP dialect, and the wire's form of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from services.gateway.text.model_files import GenerationDefaults, ModelFiles
from services.gateway.text.tokenizer import PromptTokenizer
from shared.errors import InvalidRequest
from shared.messages import LogprobsMode, ModelCard, SamplingParams

T = TypeVar("T")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """None: not given, the model's default holds. Zeros are values."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = {}
    bad_words: tuple[str, ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"


def sampling_params(
    given: Sampling, max_tokens: int, card: ModelCard, files: ModelFiles, default_seed: int
) -> SamplingParams:
    """Raises InvalidRequest for sampling that contradicts itself or the vocabulary."""
    if given.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens={given.min_tokens} is more than max_tokens={max_tokens}",
            param="min_tokens",
        )
    _check_vocabulary("stop_token_ids", given.stop_token_ids, card)
    _check_vocabulary("logit_bias", given.logit_bias, card)
    defaults = files.defaults
    eos = () if given.ignore_eos else defaults.eos_token_ids
    return SamplingParams(
        seed=(default_seed if given.seed is None else given.seed) & (2**64 - 1),
        max_tokens=max_tokens,
        temperature=_temperature(given, defaults),
        top_k=max(_first(given.top_k, defaults.top_k, 0), 0),
        top_p=_first(given.top_p, defaults.top_p, 1.0),
        min_p=_first(given.min_p, defaults.min_p, 0.0),
        min_tokens=given.min_tokens,
        ignore_eos=given.ignore_eos,
        stop_token_ids=tuple(dict.fromkeys((*given.stop_token_ids, *eos))),
        repetition_penalty=_first(given.repetition_penalty, defaults.repetition_penalty, 1.0),
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        logit_bias=tuple(given.logit_bias.items()),
        bad_words=_bad_words(given.bad_words, files.tokenizer),
        num_logprobs=given.num_logprobs,
        num_prompt_logprobs=given.num_prompt_logprobs,
        logprobs_mode=given.logprobs_mode,
    )


def _temperature(given: Sampling, defaults: GenerationDefaults) -> float:
    """A model that says `do_sample: false` is greedy for whoever says nothing about sampling."""
    named = (given.temperature, given.top_p, given.top_k, given.min_p)
    if defaults.do_sample is False and all(value is None for value in named):
        return 0.0
    return _first(given.temperature, defaults.temperature, 1.0)


def _bad_words(words: tuple[str, ...], tokenizer: PromptTokenizer) -> tuple[tuple[int, ...], ...]:
    return tuple(spelled for word in words for spelled in tokenizer.bad_word_tokens(word))


def _check_vocabulary(param: str, token_ids: Iterable[int], card: ModelCard) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < card.vocab_size:
            raise InvalidRequest(
                f"{param}: {token_id} is not in this model's vocabulary", param=param
            )


def _first(given: T | None, default: T | None, otherwise: T) -> T:
    if given is not None:
        return given
    return otherwise if default is None else default
