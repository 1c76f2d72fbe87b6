"""Values of message types, made from the types alone: every field is set, none has its default.

`python tests/skew/samples.py` prints those of the source tree on PYTHONPATH as JSON: the bytes of
each message of `shared.messages` and of each record of the KV data plane, in hexadecimal. It is run
with the code of another release, so it imports nothing but these two modules and msgspec.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
from msgspec import inspect

_TEXT = "sample-1"  # a valid name, process id, and text


def sample_of(kind: type) -> Any:
    """Returns a value of a struct with each field set. Raises ValidationError where a value made
    from the type is not enough.
    """
    node = inspect.type_info(kind)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(_value(node)), type=kind)


def _value(node: Any, extra: Any = None) -> Any:
    match node:
        case inspect.Metadata():
            return _value(node.type)
        case inspect.UnionType():
            return _value(next(each for each in node.types if not _is_none(each)))
        case inspect.LiteralType():
            return node.values[-1]
        case inspect.StructType():
            fields = {each.encode_name: _value(each.type) for each in node.fields}
            tag = {} if node.tag is None else {node.tag_field: node.tag}
            return [*tag.values(), *fields.values()] if node.array_like else {**tag, **fields}
        case inspect.TupleType():
            return [_value(each) for each in node.item_types]
        case inspect.DictType():
            return {_value(node.key_type): _value(node.value_type)}
        case inspect.BytesType():
            return bytes(range(node.min_length or min(4, node.max_length or 4)))
        case inspect.StrType():
            return _TEXT[: node.max_length] if node.max_length else _TEXT
        case inspect.BoolType():
            return True
        case inspect.IntType() | inspect.FloatType():
            return _number(node)
    item = getattr(node, "item_type", None)
    if item is None:
        raise TypeError(f"no sample of {node}")
    return [_value(item)] * max(1, node.min_length or 1)


def _number(node: Any) -> int | float:
    lowest = node.ge if node.ge is not None else node.gt if node.gt is not None else 0
    highest = node.le if node.le is not None else node.lt
    value = lowest + 1 if isinstance(node, inspect.IntType) else float(lowest) + 0.5
    return value if highest is None or value < highest else lowest


def _is_none(node: Any) -> bool:
    return isinstance(node, inspect.NoneType)


def encoded_samples() -> dict[str, dict[str, str]]:
    """Returns the bytes of every message and of every record, by their names."""
    from shared import messages
    from shared.kv_wire import frames

    kinds = {
        name: kind
        for name, kind in vars(messages).items()
        if isinstance(kind, type) and issubclass(kind, messages.Message)
    }
    del kinds["Message"]
    records = {each.__name__: each for each in frames.Record.__args__}
    return {
        "messages": {
            name: msgspec.msgpack.encode(sample_of(kind)).hex() for name, kind in kinds.items()
        },
        "records": {
            name: frames.encode_record(sample_of(kind)).hex() for name, kind in records.items()
        },
    }


if __name__ == "__main__":
    json.dump(encoded_samples(), sys.stdout, indent=0, sort_keys=True)
