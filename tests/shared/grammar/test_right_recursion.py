"""Right-recursive rules become repetitions that accept the same texts, however long."""

from __future__ import annotations

from itertools import product

import pytest

from shared.grammar.gbnf import lark_of
from shared.grammar.right_recursion import without_right_recursion
from shared.grammar.vocabulary import Vocabulary
from tests.services.gateway.grammars.conftest import tokenizer, vocabulary

__all__ = ["tokenizer", "vocabulary"]

REWRITTEN = {
    'start: "a" start | "b"': "ab",
    'start: "a" start | "b" start | "a"': "ab",
    'start: "a" start?': "ab",
    'start: item ("," start)?\nitem: "a" | "b" item | "b"': "ab,",
    'start: "a" ("b" start) | "b"': "ab",
    'start: x "!"\nx: "a" x |': "a!",
    'start: "a" start // one\n  | /b+/ start\n  | "a" "!"': "ab!",
    'start: "(" start ")" start | "a"': "()a",
}
KEPT = (
    'start: "a" ("b" start)',
    'start: start "a" | "a"',
    'start: "(" start ")" | "a"',
    'start: "a" ("b" | start)',
    'start: start "a" start | "b"',
    'start: "a" start',
    'start: "a" other\nother: "b" start | "b"',
    'start: %json {"type": "null"} start | "a"',
    'start: "a start" | "b"',
    'start[capture]: "a" start | "b"',
)


def accepts(vocabulary: Vocabulary, source: str, text: str) -> bool:
    token_ids = vocabulary.encode(text)
    matcher = vocabulary.compile("lark", source)
    return matcher.accept(token_ids) == len(token_ids) and matcher.is_accepting


@pytest.mark.parametrize("source", REWRITTEN)
def test_accepts_the_same_texts(vocabulary: Vocabulary, source: str) -> None:
    rewritten = without_right_recursion(source)
    assert rewritten != source
    chars = REWRITTEN[source]
    for text in ("".join(each) for size in range(1, 6) for each in product(chars, repeat=size)):
        assert accepts(vocabulary, rewritten, text) is accepts(vocabulary, source, text), text


@pytest.mark.parametrize("source", KEPT)
def test_other_rules_stay(source: str) -> None:
    assert without_right_recursion(source) == source


@pytest.mark.parametrize(
    "source",
    ['start: "a" start | "a"', 'start: "a" start?', lark_of('root ::= "a" root | "a"')],
)
def test_long_outputs_are_accepted(vocabulary: Vocabulary, source: str) -> None:
    """Where the rule itself ends at 2,000 rows of the parser."""
    (token_id,) = vocabulary.encode("a")
    matcher = vocabulary.compile("lark", without_right_recursion(source))
    assert matcher.accept([token_id] * 4000) == 4000
