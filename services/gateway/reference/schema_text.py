"""Writes JSON Schemas as a person reads them: types, with links to other types, and limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from markupsafe import Markup, escape

NAMES = {"string": "text", "array": "list", "boolean": "true or false"}
UNLIMITED = 2**31 - 1  # a bound from here on is only the width of the number
# the keys of the least and the greatest value, and what is counted
RANGES = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", "characters"),
    ("minItems", "maxItems", "items"),
    ("minProperties", "maxProperties", "entries"),
)


def name_of(reference: str) -> str:
    """Returns the name of the type that a reference points to."""
    return reference.rpartition("/")[2]


def type_text(schema: dict[str, Any]) -> Markup:
    """Returns the type. Null is left out: every optional field takes it."""
    if "$ref" in schema:
        name = name_of(schema["$ref"])
        return Markup('<a href="#type-{0}">{0}</a>').format(name)
    if "anyOf" in schema:
        parts = [type_text(each) for each in schema["anyOf"] if each != {"type": "null"}]
        return Markup(" or ").join(dict.fromkeys(parts))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema["const"]]
        return Markup(", ").join(_code(each) for each in values if each is not None)
    if schema.get("type") == "array":
        items = schema.get("items")
        return Markup("list of {}").format(type_text(items)) if items else Markup("list")
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        values = type_text(schema["additionalProperties"])
        return Markup("object of {}").format(values) if values != "any JSON" else Markup("object")
    kind = schema.get("type", "any JSON")
    return escape(NAMES.get(kind, kind))


def limits_text(schema: dict[str, Any]) -> str:
    """Returns the bounds of a type, of its members and items, or an empty text."""
    return ", ".join(dict.fromkeys(_limits(schema)))


def _limits(schema: dict[str, Any]) -> Iterator[str]:
    for least, most, unit in RANGES:
        text = _range(schema.get(least), schema.get(most))
        if text:
            yield f"{unit}: {text}" if unit else text
    if "exclusiveMinimum" in schema:
        yield f"more than {schema['exclusiveMinimum']}"
    for each in schema.get("anyOf", ()):
        yield from _limits(each)
    items = schema.get("items")
    if items:
        inner = limits_text(items)
        yield from [f"each item: {inner}"] if inner else []
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and limits_text(values):
        yield f"values {limits_text(values)}"


def _range(least: float | None, most: float | None) -> str:
    least, most = (
        None if each is None or abs(each) >= UNLIMITED else each for each in (least, most)
    )
    if least is None:
        return "" if most is None else f"at most {most}"
    return f"at least {least}" if most is None else f"{least} to {most}"


def _code(value: Any) -> Markup:
    return Markup("<code>{}</code>").format(json.dumps(value))


def coded(text: str) -> Markup:
    """Returns a description, in which backticks mark code."""
    parts = [escape(each) for each in text.split("`")]
    marked = [
        Markup("<code>{}</code>").format(each) if place % 2 else each
        for place, each in enumerate(parts)
    ]
    return Markup("").join(marked)
