"""Encodes logprobs in OpenAI's two forms: that of chat, and the older one of text completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec

from services.gateway.request.prompt import Echo
from services.gateway.text.decoding.token_bytes import TokenBytes
from services.gateway.text.scored_tokens import ScoredToken
from shared.errors import HearthError
from shared.messages import TokenLogprobs

_encode = msgspec.json.Encoder().encode
PART_ITEMS = 64  # items of an encoded list: up to 130 KiB with 20 top tokens each
LOWEST = -9999.0  # replaces minus infinity, which JSON cannot represent


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    """The text of the token."""
    logprob: float
    """The natural logarithm of its probability."""
    bytes: list[int]
    """The bytes of the token, which may be a part of a character."""


class ContentLogprob(msgspec.Struct, frozen=True):
    token: str
    """The text of the token."""
    logprob: float
    """The natural logarithm of its probability."""
    bytes: list[int]
    """The bytes of the token, which may be a part of a character."""
    top_logprobs: list[TopLogprob]
    """The most likely tokens at this place."""


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentLogprob]
    """One entry for each token of the text."""
    refusal: None = None
    """Always null."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Lists of equal length; null for a prompt's first token, which has no prediction."""

    tokens: list[str]
    """The texts of the tokens."""
    token_logprobs: list[float | None]
    """The natural logarithms of their probabilities."""
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens at each place, with their logarithms."""
    text_offset: list[int]
    """The first character of each token in the text, from 0."""


class ListedToken(NamedTuple):
    """A token of a text completion. `logprobs`: None for the first token of a prompt."""

    token_id: int
    logprobs: TokenLogprobs | None
    text_offset: int


def chat_logprobs(tokens: Iterable[ScoredToken], token_bytes: TokenBytes) -> ChatLogprobs:
    return ChatLogprobs([_content(each, token_bytes) for each in tokens])


def chat_logprobs_parts(tokens: Iterable[ScoredToken], token_bytes: TokenBytes) -> Iterator[bytes]:
    """Returns the encoded `chat_logprobs` in parts."""
    yield b'{"content":['
    yield from _encoded_parts(_content(each, token_bytes) for each in tokens)
    yield b'],"refusal":null}'


def output_tokens(tokens: Iterable[ScoredToken], *, first_offset: int) -> Iterator[ListedToken]:
    """Lists the tokens of an output. `first_offset`: the characters before the output, which are
    those of an echoed prompt.
    """
    for each in tokens:
        yield ListedToken(each.token_id, each.logprobs, first_offset + each.text_offset)


def check_prompt_logprobs(echo: Echo, logprobs: Sequence[TokenLogprobs]) -> None:
    """Raises HearthError if the number of logprobs is wrong: a prompt's first token has none."""
    if len(logprobs) != len(echo.token_ids) - 1:
        raise HearthError("the worker sent a wrong number of prompt logprobs")


def prompt_tokens(
    echo: Echo, logprobs: Sequence[TokenLogprobs], first: int = 0
) -> Iterator[ListedToken]:
    """Lists the tokens of a prompt from the place `first` on."""
    for place in range(first, len(echo.token_ids)):
        scored = logprobs[place - 1] if place else None
        yield ListedToken(echo.token_ids[place], scored, echo.offsets[place])


def completion_logprobs(
    tokens: Sequence[ListedToken], token_bytes: TokenBytes
) -> CompletionLogprobs:
    lists = {name: [of(each, token_bytes) for each in tokens] for name, of in _LISTS.items()}
    return CompletionLogprobs(**lists)


def completion_logprobs_parts(
    tokens: Callable[[], Iterable[ListedToken]], token_bytes: TokenBytes
) -> Iterator[bytes]:
    """Returns the encoded `completion_logprobs` in parts. Reads the tokens once for each list."""
    separator = b"{"
    for name, of in _LISTS.items():
        yield b'%b"%b":[' % (separator, name.encode())
        yield from _encoded_parts(of(each, token_bytes) for each in tokens())
        separator = b"],"
    yield b"]}"


def _encoded_parts(items: Iterator[Any]) -> Iterator[bytes]:
    """Returns the inside of an encoded list, `PART_ITEMS` items at a time."""
    separator = b""
    while part := list(islice(items, PART_ITEMS)):
        yield separator + _encode(part)[1:-1]
        separator = b","


def mean_logprob(tokens: Sequence[ScoredToken]) -> float:
    """Returns the mean over the tokens; 0, which is the maximum, for an output without tokens."""
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
    """Returns the top-k tokens and the sampled token. Of ids with equal text, the more likely one
    is reported.
    """
    named: dict[str, float] = {}
    own = ((token_id, scores.logprob),)
    for each, logprob in chain(zip(scores.top_token_ids, scores.top_logprobs, strict=True), own):
        named.setdefault(_legacy_name(token_bytes[each]), _finite(logprob))
    return named


_LISTS: dict[str, Callable[[ListedToken, TokenBytes], Any]] = {
    "tokens": lambda each, token_bytes: _legacy_name(token_bytes[each.token_id]),
    "token_logprobs": lambda each, _: (
        None if each.logprobs is None else _finite(each.logprobs.logprob)
    ),
    "top_logprobs": lambda each, token_bytes: (
        None if each.logprobs is None else _tops(each.token_id, each.logprobs, token_bytes)
    ),
    "text_offset": lambda each, _: each.text_offset,
}


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
