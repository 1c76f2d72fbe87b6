"""The values that one alternative of a schema allows: its keywords, merged with those of `allOf`.

A node is a set of pointers to schemas, all of which a value must match.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from services.gateway.schemas.document import Pointer, SchemaDocument
from services.gateway.schemas.formats import FORMATS
from shared.errors import InvalidRequest

Kind = Literal["string", "number", "boolean", "null", "array", "object"]
Node = tuple[Pointer, ...]

KINDS: tuple[Kind, ...] = ("string", "number", "boolean", "null", "array", "object")
ALL_KINDS = frozenset(KINDS)
LENGTHS = ("minLength", "maxLength")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LOWER = ("minimum", "exclusiveMinimum")
# Enforced keywords that allow or forbid values of one kind only.
_OF_KIND: dict[str, Kind] = {
    **dict.fromkeys((*LENGTHS, "pattern", "format"), "string"),
    **dict.fromkeys(BOUNDS, "number"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("properties", "required", "additionalProperties"), "object"),
}
UNENFORCED = (
    "not",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
    "unevaluatedItems",
    "additionalItems",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "minProperties",
    "maxProperties",
    "$dynamicRef",
    "$recursiveRef",
)
_UNENFORCED_OF_KIND: dict[str, Kind] = {
    "format": "string",
    **dict.fromkeys(("contains", "minContains", "maxContains", "uniqueItems"), "array"),
    **dict.fromkeys(("unevaluatedItems", "additionalItems"), "array"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), "object"),
    **dict.fromkeys(("patternProperties", "propertyNames", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties"), "object"),
}


class Shape(msgspec.Struct, kw_only=True):
    """The values that match one alternative. `kinds` are the allowed kinds, and `meant` those that
    its keywords imply: a schema with keywords of objects and without `type` means objects.
    `literals` are all values, or None if they are not listed. `bounds` apply to numbers. `patterns`
    are pairs of a pointer and its expression. `objects` and `arrays` point to the schemas with such
    keywords, `unenforced` to the keywords that are ignored.
    """

    kinds: frozenset[Kind] = ALL_KINDS
    meant: frozenset[Kind] = ALL_KINDS
    is_integer: bool = False
    literals: list[Any] | None = None
    keys: frozenset[tuple[Kind, bytes]] | None = None  # `key_of` each literal
    bounds: dict[str, float] = {}
    least_chars: int = 0
    most_chars: float = math.inf
    patterns: tuple[tuple[Pointer, str], ...] = ()
    least_items: int = 0
    most_items: float = math.inf
    arrays: tuple[Pointer, ...] = ()
    objects: tuple[Pointer, ...] = ()
    unenforced: tuple[Pointer, ...] = ()

    @property
    def written(self) -> frozenset[Kind]:
        """The kinds that a model is offered."""
        return self.meant & self.kinds or self.kinds


def shape_of(document: SchemaDocument, node: Node) -> Shape:
    """Returns the merged shape of schemas, whose applicators such as `anyOf` are ignored. Raises
    InvalidRequest.
    """
    shape = Shape()
    for pointer in node:
        schema = document.schema(pointer)
        if isinstance(schema, dict):
            _add(shape, document, pointer, schema)
    shape.unenforced = tuple(each for each in shape.unenforced if _is_about(each, shape.kinds))
    return shape


def kind_of(value: Any) -> Kind:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case str():
            return "string"
        case int() | float():
            return "number"
        case list():
            return "array"
    return "object"


def key_of(value: Any) -> tuple[Kind, bytes]:
    """Returns a key that is equal for values equal in JSON Schema: 1.0 equals 1, and `true` does
    not.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return kind_of(value), msgspec.json.encode(value, order="sorted")


def keys_of(values: list[Any]) -> set[tuple[Kind, bytes]]:
    return set(map(key_of, values))


def _is_about(place: Pointer, kinds: frozenset[Kind]) -> bool:
    """Whether the keyword at the pointer may forbid a value of the kinds; `format` forbids no
    number.
    """
    kind = _UNENFORCED_OF_KIND.get(place.rpartition("/")[2])
    return kind is None or kind in kinds


def _add(shape: Shape, document: SchemaDocument, pointer: Pointer, schema: dict[str, Any]) -> None:
    if "type" in schema:
        _add_type(shape, pointer, schema["type"])
    else:
        meant = {_OF_KIND[key] for key in schema if key in _OF_KIND}
        shape.meant &= meant or ALL_KINDS
    for keyword in ("enum", "const"):
        if keyword in schema:
            values = schema["enum"] if keyword == "enum" else [schema["const"]]
            if not isinstance(values, list):
                raise InvalidRequest(f"{pointer}/enum is no list")
            known = None if shape.literals is None else keys_of(shape.literals)
            shape.literals = [each for each in values if known is None or key_of(each) in known]
    _add_lengths(shape, pointer, schema)
    for key in BOUNDS:
        if key in schema:
            _add_bound(shape, pointer, key, schema[key])
    if "pattern" in schema:
        shape.patterns += ((f"{pointer}/pattern", _text(schema["pattern"], pointer)),)
    if any(key in schema for key in ("items", "prefixItems")):
        shape.arrays += (pointer,)
    if any(_OF_KIND.get(key) == "object" for key in schema):
        shape.objects += (pointer,)
    shape.unenforced += tuple(f"{pointer}/{key}" for key in UNENFORCED if key in schema)
    if "format" in schema:
        expression = FORMATS.get(str(schema["format"]))
        if expression is None:
            shape.unenforced += (f"{pointer}/format",)
        else:
            shape.patterns += ((f"{pointer}/format", expression),)


def _add_type(shape: Shape, pointer: Pointer, declared: Any) -> None:
    names = declared if isinstance(declared, list) else [declared]
    if any(name not in (*KINDS, "integer") for name in names):
        raise InvalidRequest(f"{pointer}/type: {declared!r} is no type of JSON")
    shape.kinds &= frozenset("number" if name == "integer" else name for name in names)
    shape.is_integer = shape.is_integer or ("integer" in names and "number" not in names)


def _add_lengths(shape: Shape, pointer: Pointer, schema: dict[str, Any]) -> None:
    least, most = _count(schema, "minLength", pointer), _count(schema, "maxLength", pointer)
    shape.least_chars = max(shape.least_chars, least or 0)
    shape.most_chars = min(shape.most_chars, math.inf if most is None else most)
    least, most = _count(schema, "minItems", pointer), _count(schema, "maxItems", pointer)
    shape.least_items = max(shape.least_items, least or 0)
    shape.most_items = min(shape.most_items, math.inf if most is None else most)


def _count(schema: dict[str, Any], key: str, pointer: Pointer) -> int | None:
    value = schema.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
        raise InvalidRequest(f"{pointer}/{key} is no count: {value!r}")
    return int(value)


def _add_bound(shape: Shape, pointer: Pointer, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{pointer}/{key} is no number: {value!r}")
    known = shape.bounds.get(key)
    if known is None:
        chosen = value
    elif key == "multipleOf":
        if known != value:
            shape.unenforced += (f"{pointer}/{key}",)
        chosen = known
    else:
        chosen = max(known, value) if key in _LOWER else min(known, value)
    shape.bounds = {**shape.bounds, key: chosen}


def _text(value: Any, pointer: Pointer) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{pointer}/pattern is no text")
    return value


# ── parts ────────────────────────────────────────────────────────────────────────────────────────


def members(
    document: SchemaDocument, shape: Shape
) -> tuple[dict[str, Node], set[str], Node | None]:
    """Returns the schemas of an object's named properties in order, the names of the required ones,
    and the schema of all other properties, or None if the object does not mention them.
    """
    names: dict[str, None] = {}
    required: dict[str, None] = {}
    for pointer in shape.objects:
        schema = document.schema(pointer)
        assert isinstance(schema, dict)
        names |= dict.fromkeys(_mapping(schema, pointer))
        listed = schema.get("required", [])
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise InvalidRequest(f"{pointer}/required is no list of names")
        required |= dict.fromkeys(listed)
    nodes = {name: _joined(_of_member(document, shape, name)) for name in {**names, **required}}
    others = [
        document.child(pointer, "additionalProperties")
        for pointer in shape.objects
        if "additionalProperties" in _dict(document, pointer)
    ]
    return nodes, set(required), _joined(others) if others else None


def items(document: SchemaDocument, shape: Shape) -> tuple[list[Node], Node]:
    """Returns the schemas of an array's first items, and the schema of the rest."""
    lists, rests = [], []
    for pointer in shape.arrays:
        schema = _dict(document, pointer)
        key = "items" if isinstance(schema.get("items"), list) else "prefixItems"
        prefix = schema.get(key, [])
        if not isinstance(prefix, list):
            raise InvalidRequest(f"{pointer}/prefixItems is no list")
        first = [document.child(pointer, key, index) for index in range(len(prefix))]
        rest = document.child(pointer, "items") if key != "items" and "items" in schema else None
        lists.append((first, rest))
        rests += [] if rest is None else [rest]
    count = max((len(first) for first, _ in lists), default=0)
    heads = []
    for index in range(count):
        found = [first[index] if index < len(first) else rest for first, rest in lists]
        heads.append(_joined(each for each in found if each is not None))
    return heads, _joined(rests)


def _of_member(document: SchemaDocument, shape: Shape, name: str) -> Iterator[Pointer]:
    for pointer in shape.objects:
        schema = _dict(document, pointer)
        if name in schema.get("properties", {}):
            yield document.child(pointer, "properties", name)
        elif "additionalProperties" in schema:
            yield document.child(pointer, "additionalProperties")


def _mapping(schema: dict[str, Any], pointer: Pointer) -> dict[str, Any]:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise InvalidRequest(f"{pointer}/properties is no object")
    return properties


def _dict(document: SchemaDocument, pointer: Pointer) -> dict[str, Any]:
    schema = document.schema(pointer)
    assert isinstance(schema, dict)
    return schema


def _joined(pointers: Any) -> Node:
    return tuple(sorted(set(pointers)))
