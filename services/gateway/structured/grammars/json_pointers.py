"""Finds the places of a keyword in a JSON Schema, as JSON pointers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.gateway.schemas.enforceable import escaped

# Keywords whose values are schemas by name, and keywords without schemas. The value of any other
# keyword is a schema if it is an object, and a list of schemas if it is a list.
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_NO_SCHEMA = {"enum", "const", "default", "examples", "required", "x-guidance"}
MAX_POINTERS = 8


def pointers(schema: Any, keyword: str) -> list[str]:
    """Returns the first places of the keyword, in the schema's order."""
    found: list[str] = []
    for pointer in _pointers(schema, keyword):
        found.append(pointer)
        if len(found) == MAX_POINTERS:
            break
    return found


def _pointers(schema: Any, keyword: str) -> Iterator[str]:
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        pointer, each = waiting.pop()
        if not isinstance(each, dict):
            continue
        if keyword in each:
            yield f"{pointer}/{escaped(keyword)}"
        waiting += reversed(list(_children(pointer, each)))


def _children(pointer: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in schema.items():
        place = f"{pointer}/{escaped(key)}"
        if key in _NO_SCHEMA:
            continue
        if isinstance(value, list):
            yield from ((f"{place}/{index}", each) for index, each in enumerate(value))
        elif isinstance(value, dict) and key in _BY_NAME:
            yield from ((f"{place}/{escaped(name)}", each) for name, each in value.items())
        else:
            yield place, value
