"""Tokens that are markers of a response template, apart from the same text of ordinary tokens.

A marker's token is written as one lone surrogate, which no text contains, in the stream and in the
patterns of the template. So a marker that is a token cannot be imitated by text, and has one
character however long it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import regex

_FIRST = 0xD800
_MAX_MARKERS = 0x800
_MARKER = regex.compile("[\ud800-\udfff]")


class MarkerTokens:
    """`by_token`: the character of each token that is a marker. No tokens: markers are text."""

    def __init__(self, tokens: Mapping[str, int] | None = None) -> None:
        """`tokens`: the ids of markers, by text."""
        ordered = sorted(tokens or {}, key=len, reverse=True)[:_MAX_MARKERS]
        chars = {text: chr(_FIRST + index) for index, text in enumerate(ordered)}
        self.by_token = {(tokens or {})[text]: char for text, char in chars.items()}
        self._chars = chars
        self._texts = {char: text for text, char in chars.items()}

    def replaced(self, text: str) -> str:
        """A text of the template with the markers as characters."""
        for marker, char in self._chars.items():
            text = text.replace(marker, char)
        return text

    def replaced_pattern(self, pattern: str) -> str:
        for marker, char in self._chars.items():
            for written in (regex.escape(marker, special_only=True), regex.escape(marker), marker):
                # a group may be named like a marker: `(?P<name>`
                pattern = regex.sub(r"(?<!\(\?P)" + regex.escape(written), char, pattern)
        return pattern

    def restored(self, text: str) -> str:
        if text.isascii():
            return text
        return _MARKER.sub(lambda found: self._texts.get(found[0], ""), text)


def marker_tokens(template: Mapping[str, Any], added_tokens: Mapping[str, int]) -> MarkerTokens:
    """Those added tokens of the tokenizer that the template mentions."""
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
