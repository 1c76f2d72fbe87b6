"""Writes a schema as llguidance can enforce it, and says what of it the output need not match.

pattern           look-around and references back are left out, or refused by name and place
properties        without `type` an object, as every vendor reads it: JSON Schema lets null through
integer           is at most 10^18 unless a bound says otherwise: without an end, models
                  write digits until max_tokens
format            date-time and time with second 60 only where RFC 3339 has it, email with the
                  lengths of RFC 5321: llguidance's own expressions let more through
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shared.errors import InvalidRequest

_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_NO_SCHEMA = frozenset(("enum", "const", "default", "examples", "required", "not", "if"))
# Beside `properties`: a type, or what may bring one.
_TYPED = frozenset(("type", "$ref", "enum", "const", "allOf", "anyOf", "oneOf"))
_NUMBERED = frozenset(("enum", "const", "$ref", "allOf", "anyOf", "oneOf"))
MOST = 10**18  # exact as a float
MAX_MULTIPLE = 10_000  # with bounds: 43 ms for the first masks; 10^5 and 10^9 reach the fuel's end
_NOT_REGULAR = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<|\(\?P=")
_NEVER = "look-around, bounds of words and references back"
_SKIPPED = re.compile(r"\\\\|\[\^?\]?(?:\\.|[^\]\\])*\]")  # what may look like one of them
_ZULU = r"(\.[0-9]+)?([Zz]|[+-]00:00)"
_EARLIER = "[^:]*:[^:]*:[0-5]"
FORMATS = {
    "date-time": rf"^({_EARLIER}|[0-9]{{4}}-(06-30|12-31)[Tt ]23:59:60{_ZULU}$)",
    "time": rf"^({_EARLIER}|23:59:60{_ZULU}$)",
    "email": r"^[^@]{1,64}@(\[|[^.]{1,63}(\.[^.]{1,63})*$)",
}


def enforceable(schema: Any, *, is_strict: bool) -> tuple[Any, tuple[str, ...]]:
    """The schema, and a warning for each pattern that is left out and each type that is added;
    bounds and formats, which change no value that clients expect, have none. Raises InvalidRequest
    for what a strict schema demands in vain. A schema that is invalid stays as it is.
    """
    warnings: list[str] = []
    return _Rewriting(warnings, is_strict).of(schema, ""), tuple(warnings)


def is_regular(pattern: str) -> bool:
    """Whether an expression has neither look-around nor references back."""
    return _NOT_REGULAR.search(_SKIPPED.sub("", pattern)) is None


class _Rewriting:
    def __init__(self, warnings: list[str], is_strict: bool) -> None:
        self._warnings = warnings
        self._is_strict = is_strict

    def of(self, schema: Any, pointer: str) -> Any:
        if isinstance(schema, list):
            return [self.of(each, f"{pointer}/{index}") for index, each in enumerate(schema)]
        if not isinstance(schema, dict):
            return schema
        found = dict(self._keywords(schema, pointer))
        if isinstance(schema.get("properties"), dict) and not _TYPED & schema.keys():
            found["type"] = "object"
            self._warnings.append(
                f"properties without a type: objects alone are allowed at {pointer}/properties"
            )
        types = _types(schema)
        is_open = not _NUMBERED & schema.keys() and _has_cheap_multiple(schema)
        if "integer" in types and "number" not in types and is_open:
            found |= _bounds(schema)
        expression = _expression(schema.get("format"))
        if expression is not None and (not types or "string" in types):
            others = found.get("allOf")
            found["allOf"] = [*(others if isinstance(others, list) else ()), expression]
        return found

    def _keywords(self, schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, Any]]:
        for key, value in schema.items():
            place = f"{pointer}/{escaped(key)}"
            if key in _NO_SCHEMA:
                yield key, value
            elif key == "pattern" and isinstance(value, str):
                if self._is_enforced(value, place):
                    yield key, value
            elif key in _BY_NAME and isinstance(value, dict):
                yield key, dict(self._named(key, value, place))
            elif key == "additionalProperties" and self._lacks_pattern(schema):
                pass  # what the pattern that is left out allows would be forbidden
            else:
                yield key, self.of(value, place)

    def _named(self, key: str, schemas: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
        for name, each in schemas.items():
            below = f"{place}/{escaped(name)}"
            if key != "patternProperties" or self._is_enforced(name, below):
                yield name, self.of(each, below)

    def _is_enforced(self, pattern: str, place: str) -> bool:
        """Raises InvalidRequest."""
        if is_regular(pattern):
            return True
        reason = f"pattern: {_NEVER} are not enforced at {place}"
        if self._is_strict:
            raise InvalidRequest(reason)
        self._warnings.append(reason)
        return False

    def _lacks_pattern(self, schema: dict[str, Any]) -> bool:
        names = schema.get("patternProperties")
        return isinstance(names, dict) and not all(map(is_regular, names))


def _types(schema: dict[str, Any]) -> list[Any]:
    """The names of the types; none where the schema names none."""
    named = schema.get("type", [])
    return named if isinstance(named, list) else [named]


def _has_cheap_multiple(schema: dict[str, Any]) -> bool:
    multiple = schema.get("multipleOf", 1)
    return isinstance(multiple, int | float) and multiple <= MAX_MULTIPLE


def _bounds(schema: dict[str, Any]) -> dict[str, int]:
    """The bounds that an integer lacks. None for one whose other bound is beyond them."""
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema.get("exclusiveMaximum"))
    bounds = {}
    if least is None and (most is None or (isinstance(most, int | float) and most > -MOST)):
        bounds["minimum"] = -MOST
    if most is None and (least is None or (isinstance(least, int | float) and least < MOST)):
        bounds["maximum"] = MOST
    return bounds


def _expression(name: Any) -> dict[str, Any] | None:
    expression = FORMATS.get(name) if isinstance(name, str) else None
    return None if expression is None else {"pattern": expression}


def escaped(key: str) -> str:
    """A key in a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
