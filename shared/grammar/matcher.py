"""The seam to llguidance: a compiled grammar at one position of an output.

llguidance raises nothing for a bad grammar or a limit that is reached, but sets a flag and then
allows anything or nothing; here every call checks the flag.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.errors import GrammarTooComplex, InvalidRequest
from shared.grammar.number_end import MAX_CHARS, NumberEnd, num_chars_after

# A lexer state takes 1 to 2 KB. With llguidance's own fuel, `^(a{1000}){1000}$` takes 1.8 s for its
# first mask; with a tenth of this one, a tenth of JSONSchemaBench's valid documents is refused.
LIMITS = LLParserLimits(initial_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False)
MAX_TOKENS_AT_ONCE = 64  # tokens to accept: 0.1 ms, in which no other thread runs Python
MAX_REASON_CHARS = 400

NO_OUTPUT = "no output matches the grammar, or a part of it"
_IS_LIMIT = re.compile(r"too (complex|large|big|many|deep|much)|limit|fuel", re.IGNORECASE)


class Matcher:
    """Matches an output against a grammar. Two threads must not use it at the same time, nor
    anybody after an error.
    """

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, number_end: NumberEnd | None
    ) -> None:
        """`number_end` ends numbers; None: they have no end but the grammar's."""
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._number_end = number_end
        self._num_number_chars = 0  # at the end of the output

    @property
    def is_accepting(self) -> bool:
        """Whether the tokens so far are a complete output."""
        return self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether the tokens so far are a complete output that nothing can continue."""
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    @property
    def warnings(self) -> list[str]:
        """Returns llguidance's warnings about ignored keywords."""
        return self._matcher.get_grammar_warnings()

    def fill(self) -> bytes:
        """[⌈vocab_size / 32⌉] little-endian 32-bit words: bit t % 32 of word t // 32 is set if
        token t may follow. End-of-sequence tokens may follow a complete output. Releases the GIL.

        Raises GrammarTooComplex for a limit, or if the tokens so far have no end.
        """
        words = self._matcher.compute_bitmask()
        self._check()
        if self._number_end is None or self._num_number_chars < MAX_CHARS:
            return words
        return self._number_end.apply(words)

    def accept(self, token_ids: Sequence[int]) -> int:
        """Continues with the tokens. Returns how many it accepted: fewer than all if the grammar
        does not allow one; the matcher stays before that. Raises GrammarTooComplex for a limit.

        Numbers of any length are accepted, as the output of another worker may have them.
        """
        for begin in range(0, len(token_ids), MAX_TOKENS_AT_ONCE):
            if len(token_ids) > 1:
                self._matcher.compute_bitmask()  # gives the lexer new fuel
            part = list(token_ids[begin : begin + MAX_TOKENS_AT_ONCE])
            num_accepted = self._matcher.try_consume_tokens(part)
            self._check()
            if self._number_end is not None:
                text = self._tokenizer.decode_bytes(part[:num_accepted])
                self._num_number_chars = num_chars_after(self._num_number_chars, text)
            if num_accepted < len(part):
                return begin + num_accepted
        return len(token_ids)

    def copy(self) -> Matcher:
        """Returns an independent matcher at the same position."""
        copy = Matcher(self._matcher.deep_copy(), self._tokenizer, self._number_end)
        copy._num_number_chars = self._num_number_chars
        return copy

    def _check(self) -> None:
        matcher = self._matcher
        if matcher.is_error():
            raise GrammarTooComplex(_reason(matcher))
        if matcher.is_stopped() and not matcher.is_accepting():
            raise GrammarTooComplex(NO_OUTPUT)


def compile_grammar(
    tokenizer: LLTokenizer, kind: str, source: str, number_end: NumberEnd
) -> Matcher:
    """Returns a matcher before the first token; `kind` and `source` as in `GrammarSpec`.
    `number_end` ends the numbers of schemas. Releases the GIL.

    Raises InvalidRequest for an invalid grammar, GrammarTooComplex for one over a limit.
    """
    matcher = LLMatcher(tokenizer, _wrapped(kind, source), log_level=0, limits=LIMITS)
    if matcher.is_error():
        reason = _reason(matcher)
        is_limit = _IS_LIMIT.search(reason) is not None
        raise (GrammarTooComplex if is_limit else InvalidRequest)(f"invalid grammar: {reason}")
    if matcher.is_stopped() and not matcher.is_accepting():
        raise InvalidRequest(f"invalid grammar: {NO_OUTPUT}")
    return Matcher(matcher, tokenizer, number_end if _has_schema(kind, source) else None)


def _has_schema(kind: str, source: str) -> bool:
    return kind == "json_schema" or (
        kind == "lark" and ("%json" in source or '"json_schema"' in source)
    )


def _wrapped(kind: str, source: str) -> str:
    """Returns the grammar as `LLMatcher` takes it. Raises InvalidRequest for a schema
    that is no JSON.
    """
    match kind:
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(source)
            except ValueError as error:
                raise InvalidRequest(f"invalid grammar: {error}") from error
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case "lark":
            return LLMatcher.grammar_from_lark(source)
    raise InvalidRequest(f"invalid grammar: its kind is {kind!r}")


def _reason(matcher: LLMatcher) -> str:
    """Returns the error, without the parser's state and the lines of the source that it quotes."""
    text, _, _ = matcher.get_error().partition("<")
    if text.startswith("NoExtension"):
        return NO_OUTPUT
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if not re.match(r"\d+ \||\^", line)]
    return " ".join(kept)[:MAX_REASON_CHARS]
