"""Records as they lie in the slots of a ring: a header and a part of the record. Pure.

    slot: number u64 | step u64 | length u32 | part u16 | num_parts u16 | checksum u64 | bytes

`number` counts the slots ever written; a reader expects each in turn, so it never takes a slot that
is older or newer. The checksum (xxh3) covers the header before it and the bytes: a slot that is
half written does not match, on any processor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
import xxhash

HEADER = struct.Struct("<QQIHHQ")
_CHECKED = struct.Struct("<QQIHH")
MAX_PARTS = 2**16 - 1


class RingError(RuntimeError):
    """A slot or a sequence of records is not what a writer of this ring writes."""


class StepGap(RingError):
    """A step is missing or comes twice."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    step: int
    index: int
    num_parts: int
    data: bytes


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A plan or an answer, with the number of its step."""

    step: int
    data: bytes


def num_parts_of(record: Record, slot_bytes: int) -> int:
    return max(1, -(-len(record.data) // (slot_bytes - HEADER.size)))


def encode_parts(record: Record, first_number: int, slot_bytes: int) -> Iterator[bytes]:
    """Returns the contents of the slots from `first_number` on. Raises ValueError for too many."""
    size = slot_bytes - HEADER.size
    num_parts = num_parts_of(record, slot_bytes)
    if num_parts > MAX_PARTS:
        raise ValueError(f"step {record.step} has {num_parts} parts: at most {MAX_PARTS}")
    for index in range(num_parts):
        data = record.data[index * size : (index + 1) * size]
        number = first_number + index
        checked = _CHECKED.pack(number, record.step, len(data), index, num_parts)
        yield checked + _checksum(checked, data).to_bytes(8, "little") + data


def decode_part(slot: memoryview | bytes, number: int) -> Part:
    """Returns the part in a slot. Raises RingError unless the slot is complete and has this
    number.
    """
    if len(slot) < HEADER.size:
        raise RingError(f"a slot of {len(slot)} bytes has no header")
    found, step, length, index, num_parts, checksum = HEADER.unpack_from(slot)
    if found != number:
        raise RingError(f"the slot holds number {found}, not {number}")
    data = bytes(slot[HEADER.size : HEADER.size + length])
    if len(data) != length or index >= num_parts:
        raise RingError(f"slot {number}: part {index} of {num_parts}, {len(data)}/{length} bytes")
    if checksum != _checksum(slot[: _CHECKED.size], data):
        raise RingError(f"slot {number} does not match its checksum")
    return Part(step, index, num_parts, data)


def _checksum(checked: memoryview | bytes, data: bytes) -> int:
    digest = xxhash.xxh3_64(checked)
    digest.update(data)
    return digest.intdigest()


class Assembly:
    """Joins the parts of consecutive steps, the first of which is `next_step`."""

    def __init__(self, next_step: int) -> None:
        self._next_step = next_step
        self._parts: list[Part] = []

    def add(self, part: Part) -> Record | None:
        """Returns the record, once its last part has come. Raises RingError, StepGap."""
        if part.step != self._next_step:
            raise StepGap(f"step {part.step} came, step {self._next_step} was expected")
        first = self._parts[0] if self._parts else part
        if part.index != len(self._parts) or part.num_parts != first.num_parts:
            raise RingError(
                f"step {part.step}: part {part.index} of {part.num_parts} came,"
                f" part {len(self._parts)} of {first.num_parts} was expected"
            )
        self._parts.append(part)
        if len(self._parts) < part.num_parts:
            return None
        parts, self._parts = self._parts, []
        self._next_step += 1
        return Record(part.step, b"".join(each.data for each in parts))
