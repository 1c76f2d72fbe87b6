"""Writes `oneOf` as `anyOf` where they are equivalent: llguidance proves this for fewer schemas."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from services.gateway.schemas.graph import SchemaGraph
from shared.errors import InvalidRequest


def without_disjoint_one_of(schema: Any) -> Any:
    """Returns an equivalent schema with `anyOf` for each `oneOf` of which no value matches two
    branches. Returns the schema unchanged if this cannot be decided.
    """
    if not _has_one_of(schema):
        return schema
    try:
        graph = SchemaGraph(schema)
        found = {id(graph.document.schema(each)) for each in graph.disjoint_one_ofs()}
        return _without(schema, found)
    except (InvalidRequest, TypeError, AttributeError, KeyError, RecursionError):
        return schema


def _has_one_of(schema: Any) -> bool:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if "oneOf" in each:
                return True
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return False


def _without(schema: Any, disjoint: Set[int]) -> Any:
    """Returns the schema with each `oneOf` of a schema whose `id()` is in `disjoint` as `anyOf`."""
    if isinstance(schema, list):
        return [_without(each, disjoint) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_any_of = id(schema) in disjoint and "anyOf" not in schema
    return {
        "anyOf" if is_any_of and key == "oneOf" else key: _without(value, disjoint)
        for key, value in schema.items()
    }
