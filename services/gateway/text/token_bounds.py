"""The most characters that one token can stand for: a lower bound of a text's tokens.

The bound holds only if the tokenizer drops no character: a normalizer that strips, a pre-tokenizer
that removes spaces, a special token that swallows them, or one unknown token for many characters
has no bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from tokenizers import Tokenizer

# Unicode composition joins at most this many characters into one (UAX #15).
COMPOSED_CHARS = 4
COMPOSING = frozenset({"NFC", "NFKC"})
KEEPING = frozenset({"NFD", "NFKD", "Prepend", "Sequence"})
SPLITTING = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Sequence", "Split"})


class _Model(msgspec.Struct, frozen=True):
    type: str = ""
    byte_fallback: bool = False


class _AddedToken(msgspec.Struct, frozen=True):
    lstrip: bool = False
    rstrip: bool = False


class _TokenizerFile(msgspec.Struct, frozen=True):
    model: _Model = _Model()
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    added_tokens: list[_AddedToken] = []


def longest_token_chars(source: str, tokenizer: Tokenizer) -> int | None:
    """Returns None if there is no bound. `source`: the text of a `tokenizer.json`."""
    file = msgspec.json.decode(source, type=_TokenizerFile)
    splits = list(_steps(file.pre_tokenizer))
    has_all_bytes = file.model.byte_fallback or any(each["type"] == "ByteLevel" for each in splits)
    if file.model.type != "BPE" or not has_all_bytes:
        return None
    if any(each.lstrip or each.rstrip for each in file.added_tokens):
        return None
    if not all(each["type"] in SPLITTING and each.get("behavior") != "Removed" for each in splits):
        return None
    composed = _composed_chars(file.normalizer)
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    return None if composed is None or not longest else composed * longest


def _composed_chars(normalizer: dict[str, Any] | None) -> int | None:
    factor = 1
    for each in _steps(normalizer):
        if each["type"] in COMPOSING:
            factor = COMPOSED_CHARS
        elif each["type"] == "Replace":
            pattern = each["pattern"].get("String")
            if pattern is None or len(each["content"]) < len(pattern):
                return None
        elif each["type"] not in KEEPING:
            return None
    return factor


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if step is not None:
        yield step
        for part in (*step.get("normalizers", ()), *step.get("pretokenizers", ())):
            yield from _steps(part)
