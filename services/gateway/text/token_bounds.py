"""Bounds the characters that one token can stand for, and so a text's tokens from below.

The bound holds only if the tokenizer drops no character: a normalizer that strips, a pre-tokenizer
that removes spaces, a special token that swallows them, or one unknown token for many characters
has no bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.tokenizer.tokenizer_steps import Step, TokenizerSteps, flattened

# Unicode composition joins at most this many characters into one (UAX #15).
COMPOSED_CHARS = 4
COMPOSING = frozenset({"NFC", "NFKC"})
KEEPING = frozenset({"NFD", "NFKD", "Prepend"})
SPLITTING = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})


def longest_token_chars(steps: TokenizerSteps, vocab: Iterable[str]) -> int | None:
    """Returns None if there is no bound. `vocab`: the tokens."""
    splits = list(flattened(steps.pre_tokenizer))
    has_all_bytes = steps.model.byte_fallback or any(each["type"] == "ByteLevel" for each in splits)
    if steps.model.type != "BPE" or not has_all_bytes:
        return None
    if any(each.lstrip or each.rstrip for each in steps.added_tokens):
        return None
    if not all(each["type"] in SPLITTING and each.get("behavior") != "Removed" for each in splits):
        return None
    composed = _composed_chars(steps.normalizer)
    longest = max(map(len, vocab), default=0)
    return None if composed is None or not longest else composed * longest


def _composed_chars(normalizer: Step | None) -> int | None:
    factor = 1
    for each in flattened(normalizer):
        if each["type"] in COMPOSING:
            factor = COMPOSED_CHARS
        elif each["type"] == "Replace":
            pattern = each["pattern"].get("String")
            if pattern is None or len(each["content"]) < len(pattern):
                return None
        elif each["type"] not in KEEPING:
            return None
    return factor
