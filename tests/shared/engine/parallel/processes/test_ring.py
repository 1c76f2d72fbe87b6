"""One writer, several readers: every record once, in order, whole; or a clear error."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest

from shared.engine.parallel.processes.record_sender import RecordSender
from shared.engine.parallel.processes.records import (
    HEADER,
    Assembly,
    Part,
    Record,
    RingError,
    StepGap,
    decode_part,
    encode_parts,
)
from shared.engine.parallel.processes.ring import (
    RingFiles,
    RingFull,
    RingReader,
    RingWriter,
    create_ring,
)
from tests.support.waiting import LIMIT_S

Make = Callable[..., RingFiles]


@pytest.fixture
def make_ring() -> Iterator[Make]:
    made: list[RingFiles] = []

    def make(num_readers: int = 1, num_slots: int = 4, slot_bytes: int = 64) -> RingFiles:
        made.append(create_ring(num_readers, num_slots, slot_bytes))
        return made[-1]

    yield make
    for files in made:
        files.close()


def records(num_records: int, max_bytes: int) -> list[Record]:
    source = random.Random(5)
    sizes = [source.randrange(max_bytes + 1) for _ in range(num_records)]
    return [Record(step, source.randbytes(size)) for step, size in enumerate(sizes)]


def test_every_reader_gets_every_record_in_order(make_ring: Make) -> None:
    """Also those that are larger than the ring."""
    files = make_ring(num_readers=3)
    sent = records(120, 3 * files.num_bytes)
    readers = [RingReader(files, index) for index in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = [
            pool.submit(lambda reader: [reader.read(LIMIT_S) for _ in sent], each)
            for each in readers
        ]
        writer = RingWriter(files, LIMIT_S)
        for record in sent:
            writer.write(record)
        assert all(each.result() == sent for each in found)


def test_ring_across_processes(make_ring: Make) -> None:
    """A child echoes what it reads; both rings are far smaller than what passes through them."""
    steps, answers = make_ring(), make_ring()
    sent = records(60, 3 * steps.num_bytes)
    child = os.fork()
    if child == 0:
        reader, writer = RingReader(steps, 0), RingWriter(answers, LIMIT_S)
        for _ in sent:
            writer.write(reader.read(LIMIT_S) or Record(0, b"nothing came"))
        os._exit(0)
    writer, reader = RingWriter(steps, LIMIT_S), RingReader(answers, 0)
    found = []
    for record in sent:
        writer.write(record)
        found.append(reader.read(LIMIT_S))
    os.waitpid(child, 0)
    assert found == sent


def test_read_waits_for_a_record_and_clears_the_event(make_ring: Make) -> None:
    files = make_ring()
    reader, writer = RingReader(files, 0), RingWriter(files, LIMIT_S)
    assert reader.read(0.0) is None
    assert reader.read(0.01) is None
    timer = threading.Timer(0.05, writer.write, [Record(0, b"a")])
    timer.start()
    assert reader.read(LIMIT_S) == Record(0, b"a")
    timer.join()
    assert reader.read(0.001) is None
    with pytest.raises(BlockingIOError):
        os.eventfd_read(reader.fileno())


def test_slow_reader_is_named_and_its_slots_are_not_overwritten(make_ring: Make) -> None:
    files = make_ring(num_readers=2)
    readers, writer = [RingReader(files, index) for index in range(2)], RingWriter(files, 0.02)
    for step in range(4):
        writer.write(Record(step, b"%d" % step))
        assert readers[0].read(LIMIT_S) is not None
    with pytest.raises(RingFull, match=r"reader 1 of .* no slot for 0\.02 s") as full:
        writer.write(Record(4, b"4"))
    assert full.value.reader == 1
    found = [readers[1].read(LIMIT_S) for _ in range(4)]
    assert found == [Record(step, b"%d" % step) for step in range(4)]


def test_sender_does_not_wait_for_readers(make_ring: Make) -> None:
    files = make_ring(num_readers=2)
    sender = RecordSender([RingWriter(files, LIMIT_S)], pytest.fail)
    sent = records(9, 2 * files.num_bytes)
    for record in sent:
        sender.send(record)
    with ThreadPoolExecutor(2) as pool:
        readers = [RingReader(files, index) for index in range(2)]
        found = pool.map(lambda each: [each.read(LIMIT_S) for _ in sent], readers)
        assert list(found) == [sent, sent]
    sender._last_late.result(LIMIT_S)
    sender.send(Record(len(sent), b"on this thread"))
    assert readers[0].read(0.0) == Record(len(sent), b"on this thread")
    sender.close()


def test_sender_reports_a_late_record_that_was_not_written(make_ring: Make) -> None:
    """At once: the next record may never come. What waits behind it is not written either."""
    files, lost = make_ring(num_slots=2), Queue()
    sender = RecordSender([RingWriter(files, 0.02)], lost.put)
    sender.send(Record(0, bytes(500)))
    sender.send(Record(1, b"waits behind it"))
    assert isinstance(lost.get(timeout=LIMIT_S), RingFull)
    sender._last_late.result(LIMIT_S)
    reader = RingReader(files, 0)
    assert reader.read(0.0) is None, "its first parts"
    sender.send(Record(2, b"has room, but follows a gap"))
    sender.close()
    assert reader.read(0.0) is None
    assert lost.empty()


def test_sender_closes_while_a_record_waits(make_ring: Make) -> None:
    files = make_ring()
    sender = RecordSender([RingWriter(files, 60.0)], pytest.fail)
    sender.send(Record(0, bytes(2 * files.num_bytes)))
    began_at = time.monotonic()
    sender.close()
    assert time.monotonic() - began_at < LIMIT_S / 2
    sender._last_late.result()


def test_missing_step_raises(make_ring: Make) -> None:
    files = make_ring()
    writer, reader = RingWriter(files, LIMIT_S), RingReader(files, 0)
    writer.write(Record(0, b"a"))
    writer.write(Record(2, b"c"))
    assert reader.read(LIMIT_S) == Record(0, b"a")
    with pytest.raises(StepGap, match="step 2 came, step 1 was expected"):
        reader.read(LIMIT_S)


@pytest.mark.parametrize("position", [0, 9, 17, 21, 23, 25, HEADER.size, HEADER.size + 4])
def test_altered_slot_raises(make_ring: Make, position: int) -> None:
    files = make_ring()
    writer, reader = RingWriter(files, LIMIT_S), RingReader(files, 0)
    writer.write(Record(0, b"12345"))
    memory = writer._ring._bytes
    memory[files.data_start + position] ^= 1
    with pytest.raises(RingError):
        reader.read(LIMIT_S)


def test_record_of_too_many_parts_is_rejected() -> None:
    with pytest.raises(ValueError, match="step 0 has 65536 parts: at most 65535"):
        list(encode_parts(Record(0, bytes(2**16)), 0, HEADER.size + 1))


def test_parts_out_of_order_are_rejected() -> None:
    assembly = Assembly(3)
    assert assembly.add(Part(3, 0, 3, b"a")) is None
    with pytest.raises(RingError, match="part 2 of 3 came, part 1 of 3 was expected"):
        assembly.add(Part(3, 2, 3, b"c"))
    with pytest.raises(RingError, match="part 1 of 2 came, part 1 of 3 was expected"):
        assembly.add(Part(3, 1, 2, b"b"))
    with pytest.raises(RingError, match="part 1 of 2 came, part 0 of 2 was expected"):
        Assembly(0).add(Part(0, 1, 2, b""))


@pytest.mark.parametrize("num_bytes", [0, 1, 32, 33, 100])
def test_parts_join_to_the_record(num_bytes: int) -> None:
    record, assembly = Record(7, random.Random(num_bytes).randbytes(num_bytes)), Assembly(7)
    slots = list(encode_parts(record, 40, HEADER.size + 32))
    assert len(slots) == max(1, -(-num_bytes // 32))
    found = [assembly.add(decode_part(slot, 40 + i)) for i, slot in enumerate(slots)]
    assert found == [None] * (len(slots) - 1) + [record]


@pytest.mark.parametrize("sizes", [(0, 4, 64), (1, 0, 64), (1, 4, HEADER.size)])
def test_ring_that_holds_nothing_is_rejected(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="readers"):
        create_ring(*sizes)
