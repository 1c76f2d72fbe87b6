"""Damaged slots of a step ring: a reader takes the records as written, or raises RingError."""

from __future__ import annotations

import contextlib
import random

from hypothesis import given
from hypothesis import strategies as st

from shared.engine.parallel.processes.records import (
    HEADER,
    Assembly,
    Part,
    Record,
    RingError,
    decode_part,
    encode_parts,
)
from shared.engine.parallel.processes.ring import RingReader, RingWriter, create_ring
from tests.fuzz.mutations import anything, torn
from tests.fuzz.profile import fuzz

SLOT_BYTES = HEADER.size + 40
RECORDS = tuple(
    Record(step, random.Random(step).randbytes(size)) for step, size in enumerate((0, 12, 40, 130))
)
FIRST = (0, 1, 2, 3)  # the slot in which each record begins
SLOTS = tuple(
    slot
    for record, first in zip(RECORDS, FIRST, strict=True)
    for slot in encode_parts(record, first, SLOT_BYTES)
)
PARTS = tuple(decode_part(slot, number) for number, slot in enumerate(SLOTS))

parts = st.builds(
    Part,
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 5),
    st.sampled_from([part.data for part in PARTS]),
)


@fuzz(300)
@given(torn(SLOTS) | st.sampled_from(SLOTS) | anything, st.integers(0, len(SLOTS)))
def test_slot_decodes_to_a_written_part_or_raises(slot: bytes, number: int) -> None:
    with contextlib.suppress(RingError):
        assert decode_part(slot, number) == PARTS[number]


@fuzz(300)
@given(st.lists(st.sampled_from(PARTS) | parts, max_size=9))
def test_assembly_returns_consecutive_steps_or_raises(given_parts: list[Part]) -> None:
    assembly, step = Assembly(0), 0
    with contextlib.suppress(RingError):
        for part in given_parts:
            if (record := assembly.add(part)) is not None:
                assert record.step == step
                step += 1


@fuzz(60)
@given(st.data())
def test_reader_survives_any_bytes_in_the_memory(data: st.DataObject) -> None:
    """Each slot is as written, damaged, or another one."""
    files = create_ring(1, len(SLOTS), SLOT_BYTES)
    writer, reader = RingWriter(files, 1.0), RingReader(files, 0)
    for record in RECORDS:
        writer.write(record)
    for number in data.draw(st.sets(st.integers(0, len(SLOTS) - 1), max_size=2)):
        damaged = data.draw(torn(SLOTS) | st.sampled_from(SLOTS) | anything)[:SLOT_BYTES]
        writer._ring.slot(number)[: len(damaged)] = damaged
    with contextlib.suppress(RingError):
        for record in RECORDS:
            assert reader.read(1.0) == record
    reader.close()
    writer.close()
    files.close()
