"""A request's sampling options, independent of dialects, and their conversion for the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from services.gateway.structured.grammars.constraint_fields import ConstraintFields
from services.gateway.text.model_files import GenerationDefaults, ModelText
from shared.errors import InvalidRequest
from shared.grammar.spec import GrammarSpec
from shared.grammar.thinking import ThinkingBudget
from shared.messages import LogprobsMode, ModelCard, SamplingParams

MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_STOP_STRINGS = 16
MAX_STRING_CHARS = 256  # a stop string or bad word: bounds the work for each delta of text
MAX_STOP_TOKEN_IDS = 64
MAX_INT = 2**31 - 1

T = TypeVar("T")
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STRING_CHARS)]
Limit = Annotated[int, Meta(ge=1)]  # `capped` bounds it
BadWord = Annotated[str, Meta(pattern=r"\S", max_length=MAX_STRING_CHARS)]  # not blank


def capped(body: msgspec.Struct, names: Iterable[str], most: int = MAX_INT) -> None:
    """Lowers limits of a body that was just decoded to `most`, beyond which a larger one means the
    same: clients send any number for "no limit".
    """
    for name in names:
        value = getattr(body, name)
        if value is not None and value > most:
            msgspec.structs.force_setattr(body, name, most)


class SamplingFields(ConstraintFields, frozen=True, kw_only=True):
    """Options as a client sends them, with their bounds. None: the model's default holds. `LIMITS`:
    the fields that any larger number means the same in.

    An HTTP dialect inherits from this Struct where its field names are the same, or fills it.
    """

    LIMITS: ClassVar[tuple[str, ...]] = ("top_k",)

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """Scales the logits before sampling; 0: always the most likely token. By default as the model's
    files say, else 1.
    """
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Samples from the most likely tokens whose probabilities add up to this."""
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """Samples from this many most likely tokens; 0 or -1: from all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Excludes tokens less likely than this share of the most likely one."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """The same seed and request give the same tokens; by default it is random."""
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    """Tokens before which neither an end token nor a stop string ends the output."""
    ignore_eos: bool | None = None
    """Whether generation goes on after the end-of-sequence token."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    """A text or texts that end the output and are not part of it."""
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    """Tokens that end the output."""
    frequency_penalty: Penalty | None = None
    """Lowers the logit of a token by this for each time that the output has it."""
    presence_penalty: Penalty | None = None
    """Lowers the logit of a token by this if the output has it."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    """Divides the logits of tokens that the prompt or the output has; 1 changes nothing."""
    logit_bias: Annotated[dict[int, Bias], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    """Added to the logits of tokens, by their ids."""
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that the output never has."""
    logprobs_mode: LogprobsMode | None = None
    """The distribution of `logprobs`: `raw`: of the model; `processed`: the one that is sampled."""

    def __post_init__(self) -> None:
        capped(self, self.LIMITS)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def resolve(
        self,
        *,
        max_tokens: int,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
        default_seed: int,
        card: ModelCard,
        files: ModelText,
        bad_words: tuple[tuple[int, ...], ...] = (),
        grammar: GrammarSpec | None = None,
        thinking: ThinkingBudget | None = None,
    ) -> SamplingParams:
        """Returns the wire's form, with the defaults of the model's files. `bad_words`: the tokens
        of each word. Raises InvalidRequest for options that contradict each other or the
        vocabulary.
        """
        min_tokens = self.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens={min_tokens} is more than max_tokens={max_tokens}", param="min_tokens"
            )
        stop_token_ids, logit_bias = self.stop_token_ids or (), self.logit_bias or {}
        _check_vocabulary("stop_token_ids", stop_token_ids, card)
        _check_vocabulary("logit_bias", logit_bias, card)
        defaults = files.defaults
        ends = () if self.ignore_eos else files.end_token_ids
        eos = (each for each in ends if each < card.vocab_size)
        return SamplingParams(
            seed=(default_seed if self.seed is None else self.seed) & (2**64 - 1),
            max_tokens=max_tokens,
            temperature=self._temperature(defaults),
            top_k=max(_first(self.top_k, defaults.top_k, 0), 0),
            top_p=_first(self.top_p, defaults.top_p, 1.0),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            min_tokens=min_tokens,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *eos))),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=tuple(logit_bias.items()),
            bad_words=bad_words,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            logprobs_mode="raw" if self.logprobs_mode is None else self.logprobs_mode,
            grammar=grammar,
            thinking=thinking,
        )

    def _temperature(self, defaults: GenerationDefaults) -> float:
        """Returns 0 if the client sends no sampling option and the model's files say `do_sample:
        false`.
        """
        given = (self.temperature, self.top_p, self.top_k, self.min_p)
        if defaults.do_sample is False and all(value is None for value in given):
            return 0.0
        return _first(self.temperature, defaults.temperature, 1.0)


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
