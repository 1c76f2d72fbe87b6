"""Encodes a large JSON object in parts, so that it is never complete in memory.

In encoded JSON, a quote inside a string follows a backslash, so a field's name with its quotes and
colon occurs only as a field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def with_list(encoded: bytes, field: bytes, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yields an encoded object with `items` in its first empty list `field`; each item comes in
    parts.
    """
    name = b'"%b":[' % field
    head, found, tail = encoded.partition(name + b"]")
    assert found, encoded
    yield head + name
    for index, item in enumerate(items):
        if index:
            yield b","
        yield from item
    yield b"]" + tail


def with_value(encoded: bytes, field: bytes, value: Iterable[bytes]) -> Iterator[bytes]:
    """Yields an encoded object with `value`, in parts, for its first null `field`."""
    name = b'"%b":' % field
    head, found, tail = encoded.partition(name + b"null")
    assert found, encoded
    yield head + name
    yield from value
    yield tail
