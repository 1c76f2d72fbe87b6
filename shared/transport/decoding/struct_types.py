"""Has msgspec examine all Struct types before threads need them, not when they are first decoded.

A thread that decodes a type which another thread is decoding for the first time reads what is
half built, and the process ends with SIGSEGV (msgspec 0.22).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec


def examine_struct_types() -> None:
    """Examines the types of all imported modules. Must be called before the threads start."""
    for kind in _subclasses(msgspec.Struct):
        with contextlib.suppress(TypeError):  # has a field of another kind: is never decoded
            msgspec.json.Decoder(kind)


def _subclasses(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
