"""The fields that OpenAI's chat and text completions share, with what vLLM adds to them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.request.sampling import Sampling
from shared.errors import InvalidRequest
from shared.messages import LogprobsMode

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_STOP_STRINGS = 16
MAX_STRING_CHARS = 256  # of stop strings and bad words: bounds the work for each piece of text
MAX_STOP_TOKEN_IDS = 64
MAX_INT = 2**31 - 1

# Fields that would change the answer and that Hearth does not serve, with the values that ask for
# nothing. Any other unknown field is ignored, as clients send many.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "prompt_logprobs": (None,),
    "response_format": (None, {"type": "text"}),
    "return_token_ids": (None, False),
    "skip_special_tokens": (None, True),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}

NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None  # the gateway's only model
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    ignore_eos: bool | None = None
    n: NumChoices | None = None
    best_of: NumChoices | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[int, Bias], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    logprobs_mode: LogprobsMode | None = None
    user: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=MAX_STRING_CHARS)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None  # higher goes first

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def has_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def to_sampling(
    body: SamplingFields,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
) -> Sampling:
    """Raises InvalidRequest where fields contradict each other."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=0 if body.min_tokens is None else body.min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop=_strings("stop", (body.stop,) if isinstance(body.stop, str) else body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        bad_words=_bad_words(body.bad_words or []),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        logprobs_mode="raw" if body.logprobs_mode is None else body.logprobs_mode,
    )


def _strings(param: str, strings: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    if "" in strings:
        raise InvalidRequest(f"{param}: a string must not be empty", param=param)
    if any(len(each) > MAX_STRING_CHARS for each in strings):
        message = f"{param}: a string must not be longer than {MAX_STRING_CHARS} characters"
        raise InvalidRequest(message, param=param)
    return tuple(strings)


def _bad_words(words: list[str]) -> tuple[str, ...]:
    if any(not word.strip() for word in words):
        raise InvalidRequest("bad_words: a word must not be blank", param="bad_words")
    return _strings("bad_words", words)
