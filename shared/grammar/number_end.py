"""Ends the numbers of JSON: a schema bounds their size at most, and models write digits until
max_tokens.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

MAX_CHARS = 24  # as -2.2250738585072014e-308: any double can be written
_CHARS = b"+-.0123456789Ee"
_IN_NUMBER = r"[-+.0-9Ee](?s:.*)"
# A number that may end is followed by none of these, text and the strings of JSON may be.
_AFTER_NONE = r"""[A-DF-Za-df-z"'](?s:.*)"""


class NumberEnd:
    """The tokens of a vocabulary that continue a number, and those that no number precedes."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._continuing = _first_tokens(tokenizer, _IN_NUMBER)
        self._excluded = _first_tokens(tokenizer, _AFTER_NONE)

    def apply(self, words: bytes) -> bytes:
        """Returns the mask after MAX_CHARS of a number: without the tokens that continue it, if it
        may end here. Returns `words` if not, or if they are those of a text.
        """
        allowed = int.from_bytes(words, "little")
        ending = allowed & ~self._continuing
        if not ending or allowed & self._excluded:
            return words
        return ending.to_bytes(len(words), "little")


def num_chars_after(num_chars: int, text: bytes) -> int:
    """Returns how many characters of a number an output ends with that continues with `text`, after
    `num_chars` of them.
    """
    num_last = len(text) - len(text.rstrip(_CHARS))
    return num_chars + num_last if num_last == len(text) else num_last


def _first_tokens(tokenizer: LLTokenizer, expression: str) -> int:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(expression), log_level=0)
    return int.from_bytes(matcher.compute_bitmask(), "little")
