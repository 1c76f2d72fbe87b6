"""Right-recursive rules become repetitions that accept the same texts, however long."""

from __future__ import annotations

import time
from itertools import product

import pytest

from shared.errors import GrammarTooComplex
from shared.grammar.gbnf import lark_of
from shared.grammar.right_recursion import without_right_recursion
from shared.grammar.vocabulary import Vocabulary
from tests.services.gateway.structured.grammars.conftest import tokenizer, vocabulary

__all__ = ["tokenizer", "vocabulary"]

AUTOMATON = "\n".join(
    f"x{i}: " + " | ".join(f'"{j}" x{j}' for j in range(4) if j != i) + ' | "."' for i in range(4)
)
REWRITTEN = {
    'start: "a" start | "b"': "ab",
    'start: "a" start | "b" start | "a"': "ab",
    'start: "a" start?': "ab",
    'start: item ("," start)?\nitem: "a" | "b" item | "b"': "ab,",
    'start: "a" ("b" start) | "b"': "ab",
    'start: x "!"\nx: "a" x |': "a!",
    'start: "a" start // one\n  | /b+/ start # two\n  | "a" "!"': "ab!",
    'start: "(" start ")" start | "a"': "()a",
    'start: "a" ("b" | start)': "ab",
    'start: "a" (("b" start | "!") | ("," start)?)': "ab,!",
    'start: start "a" start | "b"': "ab",
    'start: start "+" start | "-" start | start "!" | "a" | "(" start ")"': "+-!a()",
    'start: start start | "a" | "b"': "ab",
    'start: start | "a" start | "b"': "ab",
    'start: "a" other\nother: "b" start | "b"': "ab",
    'start: one "."\none: "a" two | "b"\ntwo: "," three | one\n'
    'three: "!" one | two "b"| "a"': "ab,!.",
    'start: one\none: "a" two | "b" three | "!"\ntwo: "b" one | three |\n'
    'three: "a" one | "," two': "ab,!",
    'start: %json {"type": "null", "title": "a start\\nb: c"} start | "a"': "a",
    '?start: "a" start | "b".."d"': "abcd",
    "start: r0\n" + "\n".join(f'r{i}: "a" r{i} | r{i + 1}' for i in range(70)) + '\nr70: "b"': "ab",
    "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(70)) + "\nr70: r0": "ab",
    'start: "a"{2} start | "b" ~ 1..2': "ab",
    'start: s0\ns0: "1" s1 | "2" s2 | "." \ns1: "1" s0 | "2" s2 | "."\ns2: "1" s0 | "2" s1': "12.",
    f"start: x0\n{AUTOMATON}": "123.",
    'start: start "+" start | unary\nunary: "-" start | "a"': "+-a",
    'start: start "?" start ":" start | other | "a"\nother: "b" start': "?:ab",
    'start: "!" start | less | start "&" start\nless: "a" "<" start | "a"': "!<&a",
    'start: item ("," start)*\nitem: "a" | "b"': "ab,",
    'start: "a" start* | "b"': "ab",
    'start: "a" "," start+ | "b"': "ab,",
    'start: "a" (start | "!")+ | "-" start | "b"': "ab-!",
    'start: "a" ("," start | "!" "a"?)* | "b"? ("," start | "!" "a"?)+': "ab,!",
    'start: "a" other\nother: "b" start | ("," other)* | "!" ("," other)+': "ab,!",
    'start: start* | "a"': "ab",
}
REFUSED = (
    'start[capture]: "a" start | "b"',
    'start: "a" start{1,2} | "b"',
    'start: "a" start* | "b" ("," start)*',
    'start: start "," (start)* | "b"',
    'start: "a" ("b" start*)+ | "b"',
    'start: start "a" start | "b" other | "b"\nother: other "b" other | start | "a"',
    "start: r1\n"
    + "\n".join(f'r{i}: "a" r{i} | "b" r{i + 1} | "c" r{i - 1}' for i in range(1, 20))
    + '\nr20: "d" | "a" r1\nr0: "c" r20',
    "start: a0\n"
    + "\n".join(f"a{i}: " + " | ".join(f'"{j}" a{j}' for j in range(9)) for i in range(9))
    + ' | "a"',
    f"start: x0\n{AUTOMATON}".replace('"1"', f'"{"1" * 2000}"'),
)
KEPT = (
    'start: start "a" start | other\nother: "b" start',
    'start: "a" ("b" start)',
    'start: start "a" | "a"',
    'start: "(" start ")" | "a"',
    'start: "a" start',
    'start: "a" other\nother: "b" start',
    'start: "a start" | "b"',
    'start: "a" other\nother: "b" start "!"? | "b"',
    'start: %lark {\nstart: "a" start | "b"\n}',
    "start: " + "(" * 2000 + "start" + ")" * 2000,
)


def accepted(vocabulary: Vocabulary, source: str, texts: list[str]) -> list[str]:
    matcher, found = vocabulary.compile("lark", source), []
    for text in texts:
        token_ids, copy = vocabulary.encode(text), matcher.copy()
        if copy.accept(token_ids) == len(token_ids) and copy.is_accepting:
            found.append(text)
    return found


@pytest.mark.parametrize("source", REWRITTEN)
def test_accepts_the_same_texts(vocabulary: Vocabulary, source: str) -> None:
    rewritten = without_right_recursion(source)
    assert rewritten != source
    chars = REWRITTEN[source]
    sizes = range(1, 6 if len(chars) < 5 else 5)
    texts = ["".join(each) for size in sizes for each in product(chars, repeat=size)]
    found = accepted(vocabulary, source, texts)
    assert found == accepted(vocabulary, rewritten, texts)
    assert found


def test_many_rules_take_little_time() -> None:
    """Each of 1,000 rules ends in the one that ends in all of them: 13 s if all are solved."""
    names = [f"x{number}" for number in range(1000)]
    source = "start: " + " | ".join(f'"{each}" {each}' for each in names)
    source += "".join(f'\n{each}: "a" start | "."' for each in names)
    began_s = time.thread_time()
    with pytest.raises(GrammarTooComplex, match="x0, x1, x2, …; "):
        without_right_recursion(source)
    assert time.thread_time() - began_s < 3


@pytest.mark.parametrize("source", REFUSED)
def test_rules_without_a_known_repetition_are_refused(source: str) -> None:
    """At once: they would fail in the middle of an answer."""
    with pytest.raises(GrammarTooComplex, match="no repetition is known for rules that end in"):
        without_right_recursion(source)


@pytest.mark.parametrize("source", KEPT)
def test_other_rules_stay(source: str) -> None:
    assert without_right_recursion(source) == source


@pytest.mark.parametrize(
    "source",
    [
        'start: "a" start | "a"',
        'start: "a" start?',
        lark_of('root ::= "a" root | "a"'),
        'start: "a" other | "a"\nother: "a" start | start',
        'start: start "a" start | "a"',
        'start: "a" start*',
        'start: "a" ("a" start)+ | "a"',
        lark_of('root ::= "a" (next | "a")\nnext ::= "a" | root'),
    ],
)
def test_long_outputs_are_accepted(vocabulary: Vocabulary, source: str) -> None:
    """Where the rule itself ends at 2,000 rows of the parser."""
    (token_id,) = vocabulary.encode("a")
    matcher = vocabulary.compile("lark", without_right_recursion(source))
    assert matcher.accept([token_id] * 4001) == 4001
