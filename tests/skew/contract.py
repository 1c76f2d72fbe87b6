"""Compares the types that two releases read, as `tests/surface` records them.

A release reads what the one before writes, and the other way, if fields are only added, and each
new one has a default. Of an object the order of fields is free; new ones of an array are its last.
A closed set of values may grow in announcements alone: `shared/transport/decoding/newer_values.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

ANNOUNCEMENTS = ("Heartbeat.",)
_VALUE = re.compile(r"'[^']*'( \| )?")


class Field(NamedTuple):
    """A line of a record. `fields` are those of the structs in it."""

    name: str
    kind: str
    has_default: bool
    fields: list[Field]


def parsed(text: str) -> dict[str, list[Field]]:
    """Returns the fields of each type of a record; lines of other kinds are left out."""
    found: dict[str, list[Field]] = {}
    stack: list[list[Field]] = []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        if not depth:
            stack = [found.setdefault(line, [])]
        elif ": " in line and depth <= len(stack):
            name, _, rest = line.strip().partition(": ")
            kind, mark, _ = rest.partition(" = ")
            field = Field(name, kind, bool(mark), [])
            stack[depth - 1].append(field)
            stack[depth:] = [field.fields]
    return found


def breaks(old: dict[str, list[Field]], new: dict[str, list[Field]]) -> Iterator[str]:
    """Yields a line for each type or field that one release writes and the other does not read."""
    for name, fields in old.items():
        if name not in new:
            yield f"{name} is gone"
        else:
            yield from _field_breaks(name, fields, new[name])


def _field_breaks(path: str, old: list[Field], new: list[Field]) -> Iterator[str]:
    is_array = any(each.name == "-" for each in old)
    if is_array:
        pairs = list(zip(old, new, strict=False))
        added = new[len(old) :]
        if len(new) < len(old):
            yield f"{path} has fewer fields"
    else:
        by_name = {each.name: each for each in new}
        yield from (f"{path}.{each.name} is gone" for each in old if each.name not in by_name)
        pairs = [(each, by_name[each.name]) for each in old if each.name in by_name]
        known = {each.name for each in old}
        added = [each for each in new if each.name not in known]
    for each in added:
        if not each.has_default:
            yield f"{path}.{each.name} is new and has no default"
    for before, after in pairs:
        where = f"{path}.{before.name}"
        if before.kind != after.kind and not _is_wider(where, before.kind, after.kind):
            yield f"{where} was {before.kind} and is {after.kind}"
        if before.has_default and not after.has_default:
            yield f"{where} has no default any more"
        if before.fields:
            yield from _field_breaks(where, before.fields, after.fields)


def _is_wider(where: str, before: str, after: str) -> bool:
    """Whether the closed set of an announcement has grown."""
    values = [{each[0].removesuffix(" | ") for each in _VALUE.finditer(k)} for k in (before, after)]
    is_rest_equal = _VALUE.sub("", before) == _VALUE.sub("", after)
    return where.startswith(ANNOUNCEMENTS) and is_rest_equal and values[0] <= values[1]
