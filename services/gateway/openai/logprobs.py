"""Logprobs in OpenAI's two shapes: that of chat, and the older shape of text completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from services.gateway.request.prompt import Echo
from services.gateway.text.scored_tokens import ScoredToken
from services.gateway.text.token_bytes import TokenBytes
from shared.errors import HearthError
from shared.messages import TokenLogprobs

LOWEST = -9999.0  # replaces minus infinity, which JSON cannot represent


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Lists of equal length; null for a prompt's first token, which has no prediction."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> ChatLogprobs:
    return ChatLogprobs([_content(each, token_bytes) for each in tokens])


def completion_logprobs(
    tokens: Sequence[ScoredToken], token_bytes: TokenBytes, *, first_offset: int
) -> CompletionLogprobs:
    """`first_offset`: number of characters before the output, if the prompt is echoed."""
    return CompletionLogprobs(
        tokens=[_legacy_name(token_bytes[each.token_id]) for each in tokens],
        token_logprobs=[_finite(each.logprobs.logprob) for each in tokens],
        top_logprobs=[_tops(each.token_id, each.logprobs, token_bytes) for each in tokens],
        text_offset=[first_offset + each.text_offset for each in tokens],
    )


def prompt_logprobs(
    echo: Echo, logprobs: Sequence[TokenLogprobs], token_bytes: TokenBytes
) -> CompletionLogprobs:
    """`logprobs`: from the second token on. Raises HearthError if their number is wrong."""
    if len(logprobs) != len(echo.token_ids) - 1:
        raise HearthError("the worker sent a wrong number of prompt logprobs")
    pairs = list(zip(echo.token_ids[1:], logprobs, strict=True))
    return CompletionLogprobs(
        tokens=[_legacy_name(token_bytes[token_id]) for token_id in echo.token_ids],
        token_logprobs=[None, *(_finite(each.logprob) for _, each in pairs)],
        top_logprobs=[None, *(_tops(token_id, each, token_bytes) for token_id, each in pairs)],
        text_offset=echo.offsets,
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def mean_logprob(tokens: Sequence[ScoredToken]) -> float:
    """Mean over the tokens; 0, the maximum, for an output without tokens."""
    return sum(each.logprobs.logprob for each in tokens) / max(len(tokens), 1)


def _content(token: ScoredToken, token_bytes: TokenBytes) -> ContentLogprob:
    own = token_bytes[token.token_id]
    scores = token.logprobs
    tops = [
        TopLogprob(_name(token_bytes[each]), _finite(logprob), list(token_bytes[each]))
        for each, logprob in zip(scores.top_token_ids, scores.top_logprobs, strict=True)
    ]
    return ContentLogprob(_name(own), _finite(scores.logprob), list(own), tops)


def _tops(token_id: int, scores: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, float]:
    """The top tokens and the token itself. Of ids with equal text, reports the more likely one."""
    named: dict[str, float] = {}
    own = ((token_id, scores.logprob),)
    for each, logprob in chain(zip(scores.top_token_ids, scores.top_logprobs, strict=True), own):
        named.setdefault(_legacy_name(token_bytes[each]), _finite(logprob))
    return named


def _name(spelled: bytes) -> str:
    text = _text(spelled)
    return _escaped(spelled) if text is None else text


def _legacy_name(spelled: bytes) -> str:
    text = _text(spelled)
    return f"bytes:{_escaped(spelled)}" if text is None else text


def _text(spelled: bytes) -> str | None:
    try:
        return spelled.decode()
    except UnicodeDecodeError:  # part of a character
        return None


def _escaped(spelled: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
