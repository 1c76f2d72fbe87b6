"""Writes a schema as llguidance can enforce it, with warnings for the keywords that are changed.

pattern           patterns with look-around or backreferences are left out, or rejected by place
properties        without `type` means an object, as for every vendor: JSON Schema allows null too
integer           is within ±10^18 unless the schema has bounds: without a bound, models write
                  digits until max_tokens
format            date-time and time allow second 60 only where RFC 3339 does, email has the
                  lengths of RFC 5321: llguidance's own expressions match more
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shared.errors import InvalidRequest

_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_NO_SCHEMA = frozenset(("enum", "const", "default", "examples", "required", "not", "if"))
# Keywords that give a type to a schema with `properties`.
_TYPED = frozenset(("type", "$ref", "enum", "const", "allOf", "anyOf", "oneOf"))
_NUMBERED = frozenset(("enum", "const", "$ref", "allOf", "anyOf", "oneOf"))
MOST = 10**18  # exact as a float
MAX_MULTIPLE = 10_000  # 43 ms for the first masks with bounds; 10^5 and 10^9 use up the fuel
_NOT_REGULAR = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<|\(\?P=")
_NEVER = "look-around, bounds of words and references back"
_SKIPPED = re.compile(r"\\\\|\[\^?\]?(?:\\.|[^\]\\])*\]")  # may contain the same characters
_ZULU = r"(\.[0-9]+)?([Zz]|[+-]00:00)"
_EARLIER = "[^:]*:[^:]*:[0-5]"
FORMATS = {
    "date-time": rf"^({_EARLIER}|[0-9]{{4}}-(06-30|12-31)[Tt ]23:59:60{_ZULU}$)",
    "time": rf"^({_EARLIER}|23:59:60{_ZULU}$)",
    "email": r"^[^@]{1,64}@(\[|[^.]{1,63}(\.[^.]{1,63})*$)",
}


def enforceable(schema: Any, *, is_strict: bool) -> tuple[Any, tuple[str, ...]]:
    """Returns the schema, and a warning for each pattern that is left out and each type that is
    added. Added bounds and formats have no warning: they exclude no value that clients expect. An
    invalid schema is returned unchanged. Raises InvalidRequest if a strict schema has a pattern
    that cannot be enforced.
    """
    warnings: list[str] = []
    return _Rewriting(warnings, is_strict).of(schema, ""), tuple(warnings)


def is_regular(pattern: str) -> bool:
    """Whether an expression has neither look-around nor backreferences."""
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
                pass  # it would forbid names that the pattern which is left out allows
            else:
                yield key, self.of(value, place)

    def _named(self, key: str, schemas: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
        for name, each in schemas.items():
            below = f"{place}/{escaped(name)}"
            if key != "patternProperties" or self._is_enforced(name, below):
                yield name, self.of(each, below)

    def _is_enforced(self, pattern: str, place: str) -> bool:
        """Whether the pattern is regular. If not, adds a warning, or raises InvalidRequest if
        strict.
        """
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
    """Returns the type names of the schema, or [] if it names none."""
    named = schema.get("type", [])
    return named if isinstance(named, list) else [named]


def _has_cheap_multiple(schema: dict[str, Any]) -> bool:
    multiple = schema.get("multipleOf", 1)
    return isinstance(multiple, int | float) and multiple <= MAX_MULTIPLE


def _bounds(schema: dict[str, Any]) -> dict[str, int]:
    """Returns the bounds to add to an integer, or {} if its other bound is beyond them."""
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
    """Returns the key escaped for a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
