"""Schemas without the parts that a model could begin, but never end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.gateway.schemas.endless import without_endless

A = {"$ref": "#/$defs/a"}
DEFS: dict[str, Any] = {
    "a": {"type": "object", "properties": {"x": A}, "required": ["x"]},
    "b": {"type": "object", "properties": {"a": A}, "required": ["a"]},
    "tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}},
    "empty": {"type": "string", "enum": [1]},
}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"x": A, "y": {}}}, {"properties": {"x": False, "y": {}}}),
        ({"anyOf": [{"type": "null"}, A]}, {"anyOf": [{"type": "null"}, False]}),
        ({"items": {"$ref": "#/$defs/b"}}, {"items": False}),
        ({"properties": {"enum": A}, "default": A}, {"properties": {"enum": False}, "default": A}),
    ],
)
def test_endless_references_become_false(schema: Any, expected: Any) -> None:
    found = without_endless({**schema, "$defs": DEFS})
    assert {key: value for key, value in found.items() if key != "$defs"} == expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "string"},
        A,  # all of it: an error says so
        {"properties": {"x": {"$ref": "#/$defs/tree"}}},
        {"properties": {"x": {"$ref": "#/$defs/empty"}}},
        {"properties": {"x": {"$ref": "#/$defs/missing"}}},
        {"properties": {"x": A}, "anyOf": 3},
    ],
)
def test_other_schemas_stay_as_they_are(schema: Any) -> None:
    defs = {name: DEFS[name] for name in ("tree", "empty")}
    whole = schema if schema is True else {**schema, "$defs": DEFS if schema == A else defs}
    assert without_endless(whole) == whole


@pytest.mark.each_value
@pytest.mark.parametrize(("num", "is_told"), [(150, True), (2000, True), (6000, False)])
@pytest.mark.parametrize("has_end", [False, True])
def test_long_chains_take_bounded_time(num: int, is_told: bool, has_end: bool) -> None:
    """One search for all references; one for each took ten seconds for 2000."""
    defs: dict[str, Any] = {
        f"d{index}": {
            "properties": {"x": {"$ref": f"#/$defs/d{(index + 1) % num}"}},
            "required": ["x"],
        }
        for index in range(num)
    }
    if has_end:
        defs[f"d{num - 1}"] = {"type": "null"}
    schema = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": defs}
    began_at = time.process_time()
    found = without_endless(schema)
    assert time.process_time() - began_at < 2
    assert (found["properties"]["a"] is False) == (is_told and not has_end)
