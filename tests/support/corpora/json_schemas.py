"""Varied JSON Schemas, as of tool arguments, API objects and configuration files; always the same.

`schema_case(n)` is one of 1,000. Like the schemas of JSONSchemaBench, about a seventh has a keyword
that llguidance does not enforce, and one in a hundred a part that it cannot read.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.support.corpora.schema_pieces import (
    FORMATS,
    NAMES,
    PATTERNS,
    PHRASES,
    UNREADABLE,
    UNSUPPORTED,
    WORDS,
    Schema,
)

NUM_SCHEMAS = 1000
MAX_BOUNDED_BYTES = 2000  # the longest document of a schema that counts as bounded
UNSUPPORTED_SHARE = 0.14
UNREADABLE_SHARE = 0.008
ESCAPED_BYTES = 6  # a character of a string as \uXXXX
SPACES = 4  # the most between two tokens of JSON

KINDS = (("tool", 1, 0.1), ("tool", 1, 0.1), ("api", 2, 0.25), ("config", 3, 0.5))


@dataclass(frozen=True)
class Part:
    """A schema. `max_bytes` is the size of its longest document, or None without a limit."""

    schema: Schema
    max_bytes: int | None = None


@dataclass(frozen=True)
class SchemaCase:
    """A schema and the answer that is expected of the gateway.

    If `is_bounded`, its documents have a largest size. `unsupported` is the keyword for which
    a strict request must be refused, or empty. If `is_unreadable`, no grammar can be made of
    it, strict or not.
    """

    name: str
    schema: Schema
    is_bounded: bool
    unsupported: str = ""
    is_unreadable: bool = False


def schema_case(number: int) -> SchemaCase:
    rng = random.Random(f"schema {number}")
    kind, depth, looseness = rng.choice(KINDS)
    parts = Parts(rng, looseness)
    root = parts.any_part(depth) if rng.random() < 0.08 else parts.object(depth)
    definitions = parts.definitions
    schema = dict(root.schema) | ({"$defs": definitions} if definitions else {})
    if rng.random() < 0.4:
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    unsupported = ""
    draw = rng.random()
    if draw < UNREADABLE_SHARE:
        schema = _with(schema, rng.choice(UNREADABLE))
    elif draw < UNREADABLE_SHARE + UNSUPPORTED_SHARE:
        unsupported, added = rng.choice(UNSUPPORTED)
        schema = _with(schema, added)
    is_supported = draw >= UNREADABLE_SHARE + UNSUPPORTED_SHARE
    is_bounded = root.max_bytes is not None and root.max_bytes <= MAX_BOUNDED_BYTES
    return SchemaCase(
        f"{kind} {number}",
        schema,
        is_bounded and is_supported,
        unsupported,
        draw < UNREADABLE_SHARE,
    )


def _with(schema: Schema, added: Schema) -> Schema:
    """Returns the schema with `added` as a property of an object, else as an alternative."""
    if schema.get("type") == "object":
        properties = {**schema.get("properties", {}), "extra": added}
        required = [*schema.get("required", ()), "extra"]
        return {**schema, "properties": properties, "required": required}
    inner = {key: value for key, value in schema.items() if not key.startswith("$")}
    outer = {key: value for key, value in schema.items() if key in ("$schema", "$defs")}
    inner |= {"$ref": schema["$ref"]} if "$ref" in schema else {}
    return {**outer, "anyOf": [inner, added]}


class Parts:
    """Random parts of one schema. `looseness` is the share of parts without limits."""

    def __init__(self, rng: random.Random, looseness: float) -> None:
        self.definitions: Schema = {}
        self._rng = rng
        self._looseness = looseness

    def any_part(self, depth: int) -> Part:
        if depth <= 0 or self._rng.random() < 0.55:
            return self._leaf()
        make = self._rng.choices(
            (self.object, self._array, self._map, self._union, self._merged, self._reference),
            (6, 5, 2, 2, 1, 1),
        )[0]
        return make(depth - 1)

    # ── containers ───────────────────────────────────────────────────────────────────────────────

    def object(self, depth: int) -> Part:
        rng = self._rng
        names = rng.sample(NAMES, rng.randint(1, 3 if depth <= 0 else 5))
        members = {name: self._described(self.any_part(depth)) for name in names}
        schema: Schema = {
            "type": "object",
            "properties": {name: each.schema for name, each in members.items()},
        }
        required = [name for name in names if rng.random() < 0.7]
        if required:
            schema["required"] = required
        is_closed = not self._is_loose()
        if is_closed:
            schema["additionalProperties"] = False
        elif rng.random() < 0.3:
            schema["additionalProperties"] = self._leaf().schema
        sizes = [
            _plus(each.max_bytes, len(name) + 4 + 4 * SPACES) for name, each in members.items()
        ]
        return Part(schema, _plus(_sum(sizes), 2 + SPACES) if is_closed else None)

    def _array(self, depth: int) -> Part:
        rng, items = self._rng, self.any_part(depth)
        if rng.random() < 0.15:
            parts = [items, self._leaf()]
            size = _plus(_sum([each.max_bytes for each in parts]), 4 + 6 * SPACES)
            prefix = [each.schema for each in parts]
            return Part({"type": "array", "prefixItems": prefix, "items": False}, size)
        schema: Schema = {"type": "array", "items": items.schema}
        if rng.random() < 0.4:
            schema["minItems"] = rng.randint(0, 2)
        if not self._is_loose():
            schema["maxItems"] = count = rng.randint(2, 5)
            each = _plus(items.max_bytes, 1 + 2 * SPACES)
            return Part(schema, None if each is None else count * each + 2 + SPACES)
        return Part(schema)

    def _map(self, depth: int) -> Part:
        """Free names: by a pattern, or at most a number of them."""
        rng, value = self._rng, self.any_part(depth).schema
        if rng.random() < 0.5:
            pattern = rng.choice(("^x-[a-z]{1,8}$", "^[A-Z_]{2,12}$", "^[0-9]{1,4}$", "^on[A-Z]"))
            properties = {"patternProperties": {pattern: value}, "additionalProperties": False}
            return Part({"type": "object", **properties})
        bounds = rng.choice(({}, {"maxProperties": 4}, {"minProperties": 1}))
        return Part({"type": "object", "additionalProperties": value, **bounds})

    def _union(self, depth: int) -> Part:
        rng = self._rng
        if rng.random() < 0.5:
            kinds = rng.sample(WORDS, 2)
            tagged = [self._tagged(kind, depth) for kind in kinds]
            sizes = [each.max_bytes for each in tagged]
            key = rng.choice(("oneOf", "anyOf"))
            return Part({key: [each.schema for each in tagged]}, _largest(sizes))
        parts = [self.any_part(depth), Part({"type": "null"}, 4)]
        sizes = [each.max_bytes for each in parts]
        return Part({"anyOf": [each.schema for each in parts]}, _largest(sizes))

    def _tagged(self, kind: str, depth: int) -> Part:
        """Returns an object that its `type` tells from others."""
        part = self.object(depth)
        properties = {"type": {"const": kind}, **part.schema["properties"]}
        required = ["type", *part.schema.get("required", ())]
        schema = {**part.schema, "properties": properties, "required": required}
        return Part(schema, _plus(part.max_bytes, len(kind) + 10 + 4 * SPACES))

    def _merged(self, depth: int) -> Part:
        """Returns two objects in one."""
        first, second = (self._rng.sample(NAMES, 2) for _ in range(2))
        schemas = [
            {"type": "object", "properties": {name: self._leaf().schema for name in names}}
            for names in (first, [each for each in second if each not in first])
        ]
        return Part({"allOf": [*schemas, {"type": "object", "required": first}]})

    def _reference(self, depth: int) -> Part:
        """Returns a reference to a definition. Some definitions contain themselves."""
        name = self._rng.choice(("node", "item", "address"))
        if name not in self.definitions:
            self.definitions[name] = {}
            own = dict(self.object(depth).schema)
            if name == "node":
                children = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 2}
                own["properties"] = {**own["properties"], "children": children}
            self.definitions[name] = own
        return Part({"$ref": f"#/$defs/{name}"})

    # ── leaves ───────────────────────────────────────────────────────────────────────────────────

    def _leaf(self) -> Part:
        weights = (5, 5, 3, 2, 2, 1, 1)
        kinds = (
            self._string,
            self._choice,
            self._integer,
            self._boolean,
            self._number,
            self._nullable,
            self._constant,
        )
        make = self._rng.choices(kinds, weights)[0]
        return make()

    def _string(self) -> Part:
        rng = self._rng
        if self._is_loose():
            return Part({"type": "string"})
        draw = rng.random()
        if draw < 0.4:
            length = rng.choice((4, 8, 16, 24))
            schema = {"type": "string", "maxLength": length}
            if rng.random() < 0.5:
                schema["minLength"] = rng.randint(1, 3)
            return Part(schema, length * ESCAPED_BYTES + 2)
        if draw < 0.65:
            pattern, length = rng.choice(PATTERNS)
            return Part({"type": "string", "pattern": pattern}, _plus(length, 2))
        name, length = rng.choice(FORMATS)
        return Part({"type": "string", "format": name}, _plus(length, 2))

    def _choice(self) -> Part:
        values: list[Any] = self._rng.sample(WORDS, self._rng.randint(2, 6))
        if self._rng.random() < 0.15:
            values += [None, self._rng.randint(-5, 99), {"unit": "°C", "of": ["é", 1.5]}]
            return Part({"enum": values}, 64)
        return Part({"type": "string", "enum": values}, max(map(len, values)) + 2)

    def _integer(self) -> Part:
        low = self._rng.choice((0, 1, -10, 1000))
        high = low + self._rng.choice((1, 9, 100, 65535))
        if self._is_loose():
            return Part({"type": "integer"})
        draw = self._rng.random()
        if draw < 0.6:
            return Part({"type": "integer", "minimum": low, "maximum": high}, len(str(high)) + 1)
        if draw < 0.9:
            bounds = {"exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
            return Part({"type": "integer", **bounds}, len(str(high)) + 1)
        return Part({"type": "integer", "minimum": low, "multipleOf": 5})

    def _number(self) -> Part:
        draw = self._rng.random()
        if draw < 0.4:
            return Part({"type": "number", "minimum": -1.5, "maximum": 99.25})
        if draw < 0.6:
            return Part({"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10})
        return Part({"type": "number"})

    def _boolean(self) -> Part:
        return Part({"type": "boolean"}, 5)

    def _nullable(self) -> Part:
        return Part({"type": ["string", "null"], "maxLength": 12}, 12 * ESCAPED_BYTES + 2)

    def _constant(self) -> Part:
        value = self._rng.choice((1, "v1", True, None, 'a "quoted" \\ one\n', [1, "two"]))
        return Part({"const": value}, 40)

    def _is_loose(self) -> bool:
        return self._rng.random() < self._looseness

    def _described(self, part: Part) -> Part:
        if self._rng.random() > 0.5:
            return part
        words = {"description": self._rng.choice(PHRASES)}
        if self._rng.random() < 0.2:
            words |= {"title": "Field", "examples": ["one"], "deprecated": False}
        return Part({**words, **part.schema}, part.max_bytes)


def _sum(sizes: list[int | None]) -> int | None:
    known = [each for each in sizes if each is not None]
    return sum(known) if len(known) == len(sizes) else None


def _largest(sizes: list[int | None]) -> int | None:
    known = [each for each in sizes if each is not None]
    return max(known) if len(known) == len(sizes) else None


def _plus(size: int | None, more: int) -> int | None:
    return None if size is None else size + more
