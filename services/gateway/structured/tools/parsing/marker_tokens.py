"""Distinguishes tokens that are markers of a response template from equal text of other tokens.

A marker's token is written as one lone surrogate, which no text contains, in the stream and in the
template's patterns. So text cannot imitate a marker that is a token, and each marker is one
character.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import regex

_FIRST = 0xD800
_MAX_MARKERS = 0x800
_MARKER = regex.compile("[\ud800-\udfff]")


class MarkerTokens:
    """The markers that are tokens. `by_token` has the character of each by token id. Without
    tokens, all markers are text.
    """

    def __init__(self, tokens: Mapping[str, int] | None = None) -> None:
        """`tokens` are the ids of markers, by text."""
        ordered = sorted(tokens or {}, key=len, reverse=True)[:_MAX_MARKERS]
        chars = {text: chr(_FIRST + index) for index, text in enumerate(ordered)}
        self.by_token = {(tokens or {})[text]: char for text, char in chars.items()}
        self._chars = chars
        self._texts = {char: text for text, char in chars.items()}

    def replaced(self, text: str) -> str:
        """Returns a text of the template with the markers as characters."""
        for marker, char in self._chars.items():
            text = text.replace(marker, char)
        return text

    def replaced_pattern(self, pattern: str) -> str:
        for marker, char in self._chars.items():
            for written in (regex.escape(marker, special_only=True), regex.escape(marker), marker):
                # A marker may also be the name of a group, as in `(?P<name>`.
                pattern = regex.sub(r"(?<!\(\?P)" + regex.escape(written), char, pattern)
        return pattern

    def restored(self, text: str) -> str:
        if text.isascii():
            return text
        return _MARKER.sub(lambda found: self._texts.get(found[0], ""), text)


def marker_tokens(template: Mapping[str, Any], added_tokens: Mapping[str, int]) -> MarkerTokens:
    """Returns the markers among a tokenizer's added tokens: those that the template contains."""
    texts = list(_texts(template.get("fields", {})))
    tokens = {}
    for marker, token_id in added_tokens.items():
        escaped = regex.escape(marker, special_only=True)
        if any(marker in text or escaped in text for text in texts):
            tokens[marker] = token_id
    return MarkerTokens(tokens)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
