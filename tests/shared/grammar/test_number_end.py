"""Numbers of schemas end: models write digits until max_tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.grammar.matcher import Matcher
from shared.grammar.number_end import MAX_CHARS
from tests.shared.grammar.support import EOS, allowed, compiled, encode, vocabulary

ANY: dict[str, Any] = {}
NUMBER: dict[str, Any] = {"type": "number"}
TEXT: dict[str, Any] = {"type": "string"}
FLOATS = (1.7976931348623157e308, -2.2250738585072014e-308, 5e-324, 6.02e23, 0.1, -0.0)
CALL = f'start: "<call>" %json {json.dumps(NUMBER)} "</call>"'
MAX_TOKENS = 200


def of(schema: object) -> Matcher:
    return compiled("json_schema", json.dumps(schema))


def digits(matcher: Matcher, begin: str, digit: str = "7") -> str:
    """Returns the output that always goes on with the digit where the mask allows it."""
    (token_id,) = encode(digit)
    token_ids = encode(begin)
    assert matcher.accept(token_ids) == len(token_ids)
    while len(token_ids) < MAX_TOKENS and token_id in allowed(matcher.fill()):
        assert matcher.accept([token_id])
        token_ids.append(token_id)
    return vocabulary().decode(token_ids).decode()


def continues(matcher: Matcher) -> list[bytes]:
    texts = (vocabulary().decode([each]) for each in allowed(matcher.fill()))
    return [each for each in texts if each[:1] in b"0123456789.eE"]


@pytest.mark.parametrize(
    "schema", [ANY, NUMBER, NUMBER | {"minimum": 0}, NUMBER | {"maximum": 1e9}]
)
@pytest.mark.parametrize("begin", ["0.", "7", "7.5", "1e", "7.5e-"])
def test_a_number_ends(schema: object, begin: str) -> None:
    matcher = of(schema)
    if matcher.copy().accept(encode(begin)) < len(encode(begin)):
        pytest.skip("the schema allows no such number")
    assert len(digits(matcher, begin)) <= MAX_CHARS
    assert matcher.is_accepting
    assert EOS in allowed(matcher.fill())


@pytest.mark.parametrize(
    ("schema", "begin"),
    [({"items": NUMBER}, "[1, -"), ({"properties": {"a": NUMBER}}, '{"a": '), (ANY, '{"a": [[0.')],
)
def test_a_number_inside_ends(schema: object, begin: str) -> None:
    number = digits(of(schema), begin).replace(begin.rstrip("0."), "")
    assert MAX_CHARS // 2 < len(number) <= MAX_CHARS


def test_a_number_of_a_call_ends() -> None:
    matcher = compiled("lark", CALL)
    assert len(digits(matcher, "<call>7")) == len("<call>") + MAX_CHARS
    assert not continues(matcher)


@pytest.mark.parametrize("value", FLOATS)
def test_each_double_can_be_written(value: float) -> None:
    matcher = of(NUMBER)
    for token_id in encode(json.dumps(value)):
        assert token_id in allowed(matcher.fill())
        assert matcher.accept([token_id])
    assert matcher.is_accepting


def test_a_number_goes_on_where_it_may_not_end() -> None:
    """An exponent has begun."""
    matcher = of(NUMBER)
    matcher.accept(encode("7" * (MAX_CHARS - 1) + "e"))
    assert continues(matcher)
    matcher.accept(encode("7"))
    assert not continues(matcher)


@pytest.mark.parametrize("schema", [TEXT, TEXT | {"pattern": "^[0-9]+$"}, {"const": "7" * 300}])
def test_digits_of_a_text_do_not_end(schema: object) -> None:
    assert len(digits(of(schema), '"7')) >= MAX_TOKENS


def test_longer_numbers_of_another_worker_are_accepted() -> None:
    token_ids = encode("7" * 40)
    assert of(NUMBER).accept(token_ids) == len(token_ids)


def test_a_copy_counts_on() -> None:
    matcher = of(NUMBER)
    matcher.accept(encode("7" * MAX_CHARS))
    assert not continues(matcher.copy())
