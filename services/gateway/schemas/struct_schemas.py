"""The JSON Schemas of message types, with a description of each field.

A field's description is the text that stands below it in its class, or one of COMMON, as in

    temperature: float | None = None
    '''Scales the logits before sampling.'''
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.inspect import StructType, type_info

TAG_DESCRIPTION = "The kind of the object."
# Of fields that stand in many responses and mean the same in all, where no text is below them.
COMMON = {
    "created": "When the request arrived, in seconds since 1970.",
    "data": "The entries.",
    "hearth": "The workers that served the request, and warnings.",
    "id": "The id of the object.",
    "model": "The name of the model that answered, as the request gave it.",
    "object": TAG_DESCRIPTION,
    "prompt_tokens": "Tokens of the prompt.",
    "request_id": "The id of the request, as in its header `x-request-id`.",
    "response": "The response as it is now.",
    "role": "Who speaks.",
    "sequence_number": "Counts the events of a stream from 0.",
    "tenant_id": "The tenant whose request it was.",
    "total_tokens": "Tokens of the prompt and of the output.",
    "usage": "The tokens that were counted.",
}


def schema_components(
    types: Iterable[Any], ref_template: str = "#/$defs/{name}"
) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Returns what msgspec's function of this name does, with docstrings as msgspec 0.23 and Python
    3.13 take them: without the indentation of their lines.
    """
    schemas, components = msgspec.json.schema_components(types, ref_template=ref_template)
    for schema in components.values():
        if "description" in schema:
            schema["description"] = inspect.cleandoc(schema["description"])
    return schemas, components


def described_schemas(
    types: Iterable[Any], ref_template: str
) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Returns the schemas of the types, and the components that they refer to, by name. A type's
    own fields stand before those of the classes above it.
    """
    types = list(types)
    schemas, components = schema_components(types, ref_template)
    for struct in _structs_of(types):
        schema = components.get(struct.__name__)
        if schema is not None:
            _describe(schema["properties"], struct)
            schema["properties"] = _ordered(schema, struct)
    return schemas, components


def field_descriptions(struct: type[Struct]) -> dict[str, str]:
    """Returns the text below each field that has one, also of the classes above."""
    found: dict[str, str] = {}
    for each in reversed(struct.__mro__):
        if issubclass(each, Struct) and each is not Struct:
            found |= _texts_of_module(each.__module__).get(each.__name__, {})
    return found


def _describe(properties: dict[str, Any], struct: type[Struct]) -> None:
    texts = COMMON | field_descriptions(struct)
    for field in msgspec.structs.fields(struct):
        if field.name in texts:
            properties[field.encode_name]["description"] = texts[field.name]
    tag_field = struct.__struct_config__.tag_field
    if tag_field is not None:
        properties[tag_field]["description"] = TAG_DESCRIPTION


def _ordered(schema: dict[str, Any], struct: type[Struct]) -> dict[str, Any]:
    """Returns the properties: required ones first, and those of a class before those above it."""
    properties = schema["properties"]
    names = {each.name: each.encode_name for each in msgspec.structs.fields(struct)}
    own = [
        names.get(name) for each in struct.__mro__ for name in vars(each).get("__annotations__", ())
    ]
    order = [*schema.get("required", ()), *own, *properties]
    return {name: properties[name] for name in dict.fromkeys(order) if name in properties}


def _structs_of(types: Iterable[Any]) -> Iterator[type[Struct]]:
    """Yields each message type that the types contain, once."""
    waiting: list[Any] = [type_info(each) for each in types]
    known: set[type[Struct]] = set()
    while waiting:
        info = waiting.pop()
        if isinstance(info, StructType):
            if info.cls in known:
                continue
            known.add(info.cls)
            yield info.cls
        waiting += _parts_of(info)


def _parts_of(info: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    """Yields the types that a type consists of: of its fields, members or items."""
    for name in info.__struct_fields__:
        value = getattr(info, name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, msgspec.inspect.Field):
                yield each.type
            elif isinstance(each, msgspec.inspect.Type):
                yield each


@cache
def _texts_of_module(module: str) -> dict[str, dict[str, str]]:
    """Returns the texts below fields, by class and field."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: dict(_texts_of_class(node)) for node in classes}


def _texts_of_class(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(node.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = _text(below)
            if text is not None:
                yield field.target.id, text


def _text(node: ast.stmt) -> str | None:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return None
    value = node.value.value
    return " ".join(value.split()) if isinstance(value, str) else None
