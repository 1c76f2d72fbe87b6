"""Reads announcements of newer releases, whose closed sets have values that this release lacks.

A heartbeat goes to processes of all releases at once, so no sender can know what its readers know.
A newer one may have a role or a state that is in no `Literal` here:

- in a tuple of such values, as `roles`, the unknown ones are left out;
- a field with a default takes the default if a value anywhere in it is unknown: a card that is not
  understood is no card;
- a field without one takes the value that its type names for this, `Meta(extra={"newer": …})`.

Commands and replies are read strictly: their sender asks for a feature first (`Request.needs`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import inspect

from shared.messages import Heartbeat

ANNOUNCEMENTS: tuple[type, ...] = (Heartbeat,)
NEWER = "newer"
_UNKNOWN: Any = object()


def announcement_decoder(message_type: Any) -> Callable[[bytes], Any]:
    """Returns a decoder that raises UNREADABLE. Of ANNOUNCEMENTS it also reads what a newer release
    sends; the second reading, in Python, is for these alone.
    """
    decode = msgspec.msgpack.Decoder(message_type).decode
    if message_type not in ANNOUNCEMENTS:
        return decode
    fields = _fields_of(message_type)

    def decode_any(data: bytes) -> Any:
        try:
            return decode(data)
        except msgspec.ValidationError:
            known = _known(fields, msgspec.msgpack.decode(data))
            if known is None:
                raise
        return decode(msgspec.msgpack.encode(known))

    return decode_any


def _fields_of(message_type: Any) -> dict[str, inspect.Field]:
    info = inspect.type_info(message_type)
    assert isinstance(info, inspect.StructType)
    return {each.encode_name: each for each in info.fields}


def _known(fields: dict[str, inspect.Field], message: Any) -> dict[str, Any] | None:
    """Returns the message without its unknown values; None if it has none."""
    if not isinstance(message, dict):
        return None
    known = dict(message)
    for name, value in message.items():
        field = fields.get(name)
        if field is None or _is_known(field.type, value):
            continue
        left = _left(field, value)
        if left is _UNKNOWN:
            del known[name]
        else:
            known[name] = left
    return None if known == message else known


def _left(field: inspect.Field, value: Any) -> Any:
    """Returns what stays of a field that has an unknown value."""
    kind, extra = _plain(field.type)
    if isinstance(kind, inspect.VarTupleType) and _is_literal(kind.item_type):
        return [each for each in value if _is_known(kind.item_type, each)]
    return extra.get(NEWER, _UNKNOWN)


def _is_known(kind: inspect.Type, value: Any) -> bool:
    """Whether no Literal within `kind` lacks what stands for it in `value`."""
    kind, _ = _plain(kind)
    match kind:
        case inspect.LiteralType(values):
            return not isinstance(value, str | int) or value in values
        case inspect.UnionType(types):
            return value is None or any(
                _is_known(each, value) for each in types if not _is_none(each)
            )
        case inspect.VarTupleType(item_type) if isinstance(value, list):
            return all(_is_known(item_type, each) for each in value)
        case inspect.StructType(fields=fields, array_like=True) if isinstance(value, list):
            start = kind.tag is not None
            pairs = zip(fields, value[start:], strict=False)
            return all(_is_known(each.type, item) for each, item in pairs)
        case inspect.StructType(fields=fields) if isinstance(value, dict):
            return all(
                _is_known(each.type, value[each.encode_name])
                for each in fields
                if each.encode_name in value
            )
    return True


def _plain(kind: inspect.Type) -> tuple[inspect.Type, dict[str, Any]]:
    """Returns the type without its metadata, and their extra."""
    if isinstance(kind, inspect.Metadata):
        return kind.type, kind.extra or {}
    return kind, {}


def _is_literal(kind: inspect.Type) -> bool:
    return isinstance(_plain(kind)[0], inspect.LiteralType)


def _is_none(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.NoneType)
