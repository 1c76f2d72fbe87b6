"""Describes what a type looks like when it is encoded, whatever its class is called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

_BOUNDS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")


def shape_lines(described: Any, indent: str = "  ") -> Iterator[str]:
    """One line a field of a struct, with its default; the fields of structs in it below it."""
    yield from _fields(inspect.type_info(described), indent, ())


def _fields(node: inspect.Type, indent: str, above: tuple[type, ...]) -> Iterator[str]:
    for struct in _structs(node):
        if struct.cls in above:
            yield f"{indent}… as above"
            continue
        for field in struct.fields:
            name = "-" if struct.array_like else field.encode_name
            default = "" if field.required else f" = {_default(field)}"
            yield f"{indent}{name}: {_name(field.type)}{default}"
            yield from _fields(field.type, indent + "  ", (*above, struct.cls))


def _default(field: inspect.Field) -> str:
    if field.default_factory is field.default:  # msgspec.UNSET
        return "omitted"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return repr(msgspec.to_builtins(value, builtin_types=(bytes,), str_keys=False))


def _structs(node: Any) -> Iterator[inspect.StructType]:
    """The structs that a value of the type holds, without those inside of them."""
    if isinstance(node, inspect.StructType):
        yield node
    elif isinstance(node, inspect.Metadata):
        yield from _structs(node.type)
    elif isinstance(node, inspect.UnionType):
        for each in node.types:
            yield from _structs(each)
    elif isinstance(node, inspect.DictType):
        yield from _structs(node.value_type)
    elif isinstance(node, inspect.TupleType):
        for each in node.item_types:
            yield from _structs(each)
    elif isinstance(item := getattr(node, "item_type", None), inspect.Type):
        yield from _structs(item)


def _name(node: Any) -> str:
    if isinstance(node, inspect.Metadata):
        return _name(node.type)
    if isinstance(node, inspect.StructType):
        kind = "array" if node.array_like else "object"
        tag = "" if node.tag is None else f" {node.tag}"
        return f"{kind}{tag}{'' if not node.forbid_unknown_fields else ' closed'}"
    if isinstance(node, inspect.UnionType):
        return " | ".join(map(_name, node.types))
    if isinstance(node, inspect.LiteralType):
        return " | ".join(map(repr, node.values))
    if isinstance(node, inspect.DictType):
        return f"{{{_name(node.key_type)}: {_name(node.value_type)}}}{_bounds(node)}"
    if isinstance(node, inspect.TupleType):
        return f"[{', '.join(map(_name, node.item_types))}]"
    if isinstance(item := getattr(node, "item_type", None), inspect.Type):
        return f"[{_name(item)}, …]{_bounds(node)}"
    return type(node).__name__.removesuffix("Type").lower() + _bounds(node)


def _bounds(node: Any) -> str:
    given = ((each, getattr(node, each, None)) for each in _BOUNDS)
    text = ", ".join(f"{name} {value}" for name, value in given if value is not None)
    return f" ({text})" if text else ""
