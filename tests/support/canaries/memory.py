"""All data that objects of a process refer to: bytes, texts, arrays and lists of numbers."""

from __future__ import annotations

import asyncio
import gc
import mmap
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np

from shared.packing import pack_token_ids

Piece = tuple[str, bytes]
# Modules and classes are of the program, a loop leads to everything else of the test.
SKIPPED = (type, ModuleType, BuiltinFunctionType, asyncio.AbstractEventLoop)
MAX_TOKEN_ID = 2**32


def data_of(roots: Iterable[Any], *, without: Iterable[Any] = ()) -> Iterator[Piece]:
    """Yields each piece of data, after the kind of object that it is in. `without`: objects that
    are not entered.
    """
    seen, retained, todo = {id(each) for each in without}, [], list(roots)
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, SKIPPED):
            continue
        seen.add(id(each))
        retained.append(each)  # so that no other object gets its id
        yield from _own_data(each)
        todo += _referents(each)


def _own_data(each: Any) -> Iterator[Piece]:
    match each:
        case bytes() | bytearray():
            yield "bytes", bytes(each)
        case str():
            yield "str", each.encode(errors="replace")
        case memoryview():
            yield "memoryview", each.tobytes()
        case mmap.mmap():
            yield "mmap", each[:]
        case np.ndarray() if each.dtype != object:
            yield "ndarray", each.tobytes()
        case array():
            yield "array", each.tobytes()
        case list() | tuple() | deque() if each and all(type(part) is int for part in each):
            numbers = [part for part in each if 0 <= part < MAX_TOKEN_ID]
            yield type(each).__name__, pack_token_ids(numbers)


def _referents(each: Any) -> list[Any]:
    match each:
        case str() | bytes() | bytearray() | np.ndarray():
            return []
        case FunctionType():  # its module has nothing of a request
            cells = [cell.cell_contents for cell in each.__closure__ or () if _is_filled(cell)]
            return [*cells, each.__defaults__, each.__kwdefaults__]
        case FrameType():
            return list(each.f_locals.values())
    fields = getattr(type(each), "__struct_fields__", ())
    return [*gc.get_referents(each), *(getattr(each, name) for name in fields)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
