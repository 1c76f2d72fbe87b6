"""`oneOf` becomes `anyOf` only where no value matches two branches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.schemas.disjoint import without_disjoint_one_of
from services.gateway.structured.grammars.grammar import json_grammar
from shared.errors import InvalidRequest
from shared.grammar.vocabulary import Vocabulary
from tests.services.gateway.structured.grammars.conftest import tokenizer, vocabulary

__all__ = ["tokenizer", "vocabulary"]


def tagged(kind: Any, **properties: Any) -> dict[str, Any]:
    properties = {"kind": kind, **properties}
    return {"type": "object", "properties": properties, "required": [*properties]}


A, B = tagged({"const": "a"}, n={"type": "integer"}), tagged({"enum": ["b", "c"]})
DISJOINT = {
    "kinds": [{"type": "string"}, {"type": "integer"}, {"type": "null"}],
    "tags": [A, B],
    "values": [{"const": 1}, {"enum": [2, "x"]}],
    "a value and a bound": [{"const": 1}, {"type": "integer", "minimum": 2}],
    "references": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    "nested": [{"anyOf": [A, {"type": "null"}]}, B],
}
COMMON = {
    "equal": [{"type": "string"}, {"type": "string"}],
    "a part": [{"type": "number"}, {"type": "integer"}],
    "equal numbers": [{"const": 1}, {"const": 1.0}],
    "a common tag": [A, tagged({"enum": ["a", "b"]})],
    "an optional tag": [{**A, "required": ["n"]}, {**B, "required": []}],
    "any value": [{}, {"type": "string"}],
    "a value within bounds": [{"const": 3}, {"type": "integer", "minimum": 2}],
    "objects by their properties": [tagged({}), {"type": "object", "required": ["other"]}],
}


def schema(branches: list[Any]) -> dict[str, Any]:
    return {"oneOf": branches, "$defs": {"a": A, "b": B}}


@pytest.mark.parametrize("name", DISJOINT)
def test_one_of_disjoint_branches_is_any_of_them(name: str, vocabulary: Vocabulary) -> None:
    given = schema(DISJOINT[name])
    assert without_disjoint_one_of(given) == {"anyOf": given["oneOf"], "$defs": given["$defs"]}
    assert without_disjoint_one_of({"items": given, "$defs": given["$defs"]})["items"]["anyOf"]
    grammar = json_grammar(given, is_strict=True)
    assert vocabulary.compile(grammar.kind, grammar.source).warnings == []


@pytest.mark.parametrize("name", COMMON)
def test_one_of_others_stays(name: str, vocabulary: Vocabulary) -> None:
    given = schema(COMMON[name])
    assert without_disjoint_one_of(given) == given
    grammar = json_grammar(given, is_strict=True)
    with pytest.raises(InvalidRequest, match="oneOf"):
        vocabulary.compile(grammar.kind, grammar.source)


@pytest.mark.parametrize(
    "given",
    [
        {"oneOf": [A, B], "anyOf": [{"required": ["n"]}, {}]},  # has one
        {"enum": [{"oneOf": [A, B]}]},  # a value
        {"oneOf": [A, {"$ref": "#/missing"}]},
        {"oneOf": 5},
        True,
    ],
)
def test_what_cannot_be_written_so_stays(given: Any) -> None:
    assert without_disjoint_one_of(given) == given


@pytest.mark.parametrize(
    ("document", "is_valid"),
    [
        ({"kind": "a", "n": 1}, True),
        ({"kind": "c"}, True),
        ({"kind": "a"}, False),
        ({"kind": "d"}, False),
    ],
)
def test_strict_grammar_of_tagged_branches(
    vocabulary: Vocabulary, document: Any, is_valid: bool
) -> None:
    grammar = json_grammar(schema([A, B]), is_strict=True)
    matcher = vocabulary.compile(grammar.kind, grammar.source)
    token_ids = vocabulary.encode(json.dumps(document))
    is_accepted = matcher.accept(token_ids) == len(token_ids) and matcher.is_accepting
    assert is_accepted == is_valid
