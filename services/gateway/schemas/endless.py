"""Removes the parts of a schema that no finite value matches: a model could never end them."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from services.gateway.schemas.graph import SchemaGraph
from shared.errors import InvalidRequest

_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_NO_SCHEMA = frozenset(("enum", "const", "default", "examples"))


def without_endless(schema: Any) -> Any:
    """Returns a schema with the same finite values, with `false` for each reference to a schema
    that only infinite values match. Returns it unchanged if all values are infinite or this cannot
    be decided.
    """
    references = set(_references(schema))
    if not references:
        return schema
    try:
        found = _without(schema, _endless(schema, references))
    except (InvalidRequest, TypeError, AttributeError, KeyError, RecursionError):
        return schema
    return found if isinstance(found, dict) else schema


def _endless(schema: Any, references: Set[str]) -> Set[str]:
    graph = SchemaGraph(schema)
    targets = {each: graph.document.target(each) for each in sorted(references)}
    endless = graph.endless((target,) for target in targets.values() if target is not None)
    return {each for each, target in targets.items() if (target,) in endless}


def _references(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if isinstance(each.get("$ref"), str):
                yield each["$ref"]
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _without(schema: Any, endless: Set[str]) -> Any:
    if not endless:
        return schema
    if isinstance(schema, list):
        return [_without(each, endless) for each in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference in endless:
        return False
    return {key: _of_keyword(key, value, endless) for key, value in schema.items()}


def _of_keyword(key: str, value: Any, endless: Set[str]) -> Any:
    if key in _NO_SCHEMA:
        return value
    if key in _BY_NAME and isinstance(value, dict):
        return {name: _without(each, endless) for name, each in value.items()}
    return _without(value, endless)
