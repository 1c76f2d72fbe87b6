"""Shared memory and TCP links: corruption, limits, killed peers and leaked resources."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from operator import le
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.clock import MonotonicClock
from shared.errors import FrameRefused, LinkLost
from shared.kv_wire import record_stream, shared_memory
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.expected_pushes import ExpectedPushes
from shared.kv_wire.frames import Frame
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.push_link import StagedLink
from shared.kv_wire.tcp import TcpReception
from shared.messages import DataPlaneAddress
from tests.shared.kv_wire.support import (
    DEADLINE_S,
    INSTANCE,
    RecordingSink,
    eventually,
    fill_with,
    header,
    open_files,
    path_of_descriptor,
    payload_of,
)
from tests.support.canaries.memory import data_of
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[3]
NUM_SLOTS = 4


def corrupt_after_checksum(link: StagedLink) -> None:
    """Corrupts the next frame's payload after its checksum and before the receiver's copy."""
    transmit = link._staging.transmit

    def transmit_corrupted(
        stream: record_stream.RecordStream, frame_id: int, header: object, slot_index: int
    ) -> None:
        link._staging.view(slot_index, 1)[0] ^= 0x10
        link._staging.transmit = transmit  # type: ignore[method-assign]
        transmit(stream, frame_id, header, slot_index)  # type: ignore[arg-type]

    link._staging.transmit = transmit_corrupted  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("num_bytes", [1, 4096, 3 << 20])
async def test_corrupt_payload_is_rejected_and_counted(
    server: KvServer, dialer: Dialer, address: DataPlaneAddress, num_bytes: int
) -> None:
    sink, data = RecordingSink(), payload_of(num_bytes)
    server.expect(b"placement-a", sink)
    link = await dialer.link(address)
    corrupt_after_checksum(link)
    with pytest.raises(FrameRefused, match="checksum"):
        await link.send(header(num_bytes, sequence_number=5), fill_with(data))
    assert [found.sequence_number for found in sink.corrupted] == [5]
    assert sink.frames == []
    assert server.counts.num_corrupt == 1
    await link.send(header(num_bytes), fill_with(data))
    assert [found for _, found in sink.frames] == [data]


@pytest.mark.parametrize(
    "changed",
    [
        {"placement_id": b"placement-b"},
        {"first_token": 16},
        {"sequence_number": 4},
        {"num_cached_tokens": 1},
    ],
)
async def test_altered_header_fails_the_checksum(
    server: KvServer, dialer: Dialer, address: DataPlaneAddress, changed: dict[str, Any]
) -> None:
    sinks = {each: RecordingSink() for each in (b"placement-a", b"placement-b")}
    for placement_id, sink in sinks.items():
        server.expect(placement_id, sink)
    link = await dialer.link(address)
    transmit = link._staging.transmit

    def transmit_altered(
        stream: record_stream.RecordStream, frame_id: int, sealed: Any, slot_index: int
    ) -> None:
        transmit(stream, frame_id, msgspec.structs.replace(sealed, **changed), slot_index)

    link._staging.transmit = transmit_altered  # type: ignore[method-assign, assignment]
    with pytest.raises(FrameRefused, match="checksum"):
        await link.send(header(100), fill_with(payload_of(100)))
    assert not any(sink.frames for sink in sinks.values())
    assert server.counts.num_corrupt == 1


async def test_slow_sink_limits_frames_in_flight(
    server: KvServer, dialer: Dialer, address: DataPlaneAddress
) -> None:
    num_filled = 0

    async def fill(view: memoryview) -> None:
        nonlocal num_filled
        num_filled += 1

    gate = asyncio.Event()
    sink = RecordingSink(gate)
    server.expect(b"placement-a", sink)
    link = await dialer.link(address)
    sends = [asyncio.ensure_future(link.send(header(100_000), fill)) for _ in range(20)]
    async with asyncio.timeout(DEADLINE_S):
        await sink.entered.wait()
        await eventually(lambda: link.num_unacked == NUM_SLOTS)
        for _ in range(50):
            await asyncio.sleep(0)
        assert (num_filled, link.num_unacked) == (NUM_SLOTS, NUM_SLOTS)
        gate.set()
        await asyncio.gather(*sends)
    assert num_filled == 20
    assert link.num_unacked == 0


async def test_cancelled_send_awaits_fill_and_frees_slot(
    server: KvServer, dialer: Dialer, address: DataPlaneAddress
) -> None:
    has_started, may_end = asyncio.Event(), asyncio.Event()
    has_ended = False

    async def fill(view: memoryview) -> None:
        nonlocal has_ended
        has_started.set()
        await may_end.wait()
        has_ended = True

    server.expect(b"placement-a", RecordingSink())
    link = await dialer.link(address)
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(2 * NUM_SLOTS):
            has_ended = False
            has_started.clear()
            may_end.clear()
            send = asyncio.ensure_future(link.send(header(3), fill))
            await has_started.wait()
            send.cancel()
            await asyncio.sleep(0)
            assert not send.done()
            may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await send
            assert has_ended
        await link.send(header(3), fill_with(b"abc"))
    assert server.counts.num_frames == 1


async def test_ack_frees_slot_of_cancelled_send(
    server: KvServer, dialer: Dialer, address: DataPlaneAddress
) -> None:
    gate = asyncio.Event()
    sink = RecordingSink(gate)
    server.expect(b"placement-a", sink)
    link = await dialer.link(address)
    sends = [asyncio.ensure_future(link.send(header(3), fill_with(b"abc"))) for _ in range(4)]
    await eventually(lambda: link.num_unacked == NUM_SLOTS)
    for send in sends:
        send.cancel()
    await asyncio.gather(*sends, return_exceptions=True)
    gate.set()
    async with asyncio.timeout(DEADLINE_S):
        await link.send(header(3, sequence_number=9), fill_with(b"xyz"))
    assert sink.sequence_numbers == [0, 0, 0, 0, 9]


async def test_killed_sender_notifies_sinks(server: KvServer, address: DataPlaneAddress) -> None:
    sink = RecordingSink()
    server.expect(b"placement-a", sink)
    script = Path(__file__).with_name("sender_process.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), msgspec.json.encode(address).decode(), cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            await sink.entered.wait()
            process.send_signal(signal.SIGKILL)
            await sink.lost.wait()
    finally:
        await process.wait()
    await eventually(lambda: server.num_connections == 0)
    assert sink.num_lost == 1
    assert all(data == bytes(1 << 20) for _, data in sink.frames)


@pytest.mark.parametrize("transport", ["memfd", "tcp"])
async def test_killed_receiver_fails_every_send(dialer: Dialer, transport: str) -> None:
    script = Path(__file__).with_name("receiver_process.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            address = msgspec.json.decode(await process.stdout.readline(), type=DataPlaneAddress)
            directory = Path(address.unix_path).parent
            if transport == "tcp":
                address = msgspec.structs.replace(address, unix_path="")
            link = await dialer.link(address)
            sends = [
                asyncio.ensure_future(link.send(header(50_000), fill_with(bytes(50_000))))
                for _ in range(10)
            ]
            await eventually(lambda: link.num_unacked == NUM_SLOTS)
            process.send_signal(signal.SIGKILL)
            results = await asyncio.gather(*sends, return_exceptions=True)
    finally:
        await process.wait()
    shutil.rmtree(directory)  # the killed receiver cannot remove it
    assert [type(result) for result in results] == [LinkLost] * 10
    with pytest.raises(LinkLost):
        await dialer.link(address)


def num_open_resources() -> tuple[int, int, int]:
    """Numbers of files, threads and tasks, without the executor threads that the loop starts."""
    gc.collect()
    own = [each for each in threading.enumerate() if not each.name.startswith("asyncio_")]
    return len(open_files()), len(own), len(asyncio.all_tasks())


async def test_closed_links_leak_nothing(address: DataPlaneAddress, server: KvServer) -> None:
    async def push_and_close(is_busy: bool) -> None:
        gate = asyncio.Event()
        sink = RecordingSink(gate if is_busy else None)
        server.expect(b"placement-a", sink)
        dialer = Dialer(connect_timeout_s=LIMIT_S)
        link = await dialer.link(address)
        send = asyncio.ensure_future(link.send(header(2 << 20), fill_with(bytes(2 << 20))))
        await sink.entered.wait()
        if not is_busy:
            await send
        await dialer.close()
        gate.set()
        await asyncio.gather(send, return_exceptions=True)
        server.forget(b"placement-a")
        await eventually(lambda: server.num_connections == 0)

    await push_and_close(False)  # opens the resources that stay open
    before = num_open_resources()
    for is_busy in (False, True):
        await push_and_close(is_busy)
    # a closed transport closes its socket a few loop iterations later
    await eventually(lambda: all(map(le, num_open_resources(), before)))


async def test_closed_server_leaks_no_file_or_task() -> None:
    before = open_files(), len(asyncio.all_tasks())
    server = await KvServer.start(instance_id=INSTANCE)
    directory = Path(server.address.unix_path).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    await server.close()
    await server.close()
    await asyncio.sleep(0)
    assert not directory.exists()
    gc.collect()
    assert (open_files(), len(asyncio.all_tasks())) == before


async def test_server_below_a_long_temporary_directory_shares_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialer: Dialer
) -> None:
    (tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    server = await KvServer.start(instance_id=INSTANCE)
    await dialer.link(msgspec.structs.replace(server.address, port=1))
    await server.close()
    assert not Path(server.address.unix_path).parent.exists()


async def test_small_frames_take_little_memory(server: KvServer, dialer: Dialer) -> None:
    server.expect(b"placement-a", RecordingSink())
    link = await dialer.link(msgspec.structs.replace(server.address, port=1))
    for number in range(50):
        await link.send(header(10_000, sequence_number=number), fill_with(bytes(10_000)))
    status = os.stat(path_of_descriptor("hearth-kv (deleted)"))  # noqa: PTH116
    assert status.st_size == shared_memory.NUM_SLOTS * shared_memory.SLOT_BYTES
    assert status.st_blocks * 512 <= NUM_SLOTS * 16_384


async def test_dialer_falls_back_to_tcp(server: KvServer, tmp_path: Path, dialer: Dialer) -> None:
    server.expect(b"placement-a", RecordingSink())
    (tmp_path / "a_file").touch()
    other = await KvServer.start(instance_id=b"another-instance")
    paths = [str(tmp_path / "nothing"), str(tmp_path / "a_file"), other.address.unix_path]
    for unix_path in [*paths, "/" + "x" * 300]:
        link = await dialer.link(msgspec.structs.replace(server.address, unix_path=unix_path))
        await link.send(header(3), fill_with(b"abc"))
        await link.close()
    await other.close()
    assert server.counts.num_frames == 4


async def test_private_frames_leave_zeros_at_both_ends(
    server: KvServer, dialer: Dialer, address: DataPlaneAddress
) -> None:
    sink, data = RecordingSink(), payload_of(3 << 20)
    link = await dialer.link(address)

    def num_copies() -> int:
        of_frame = [frame for frame, _ in sink.frames]
        found = data_of((link, server), without=(sink.frames, data, *of_frame))
        return sum(data[:64] in piece for _, piece in found)

    for placement_id, is_private in ((b"placement-a", False), (b"placement-b", True)):
        server.expect(placement_id, sink, is_private=is_private)
        await link.send(
            header(len(data), placement_id=placement_id), fill_with(data), is_private=is_private
        )
        assert sink.frames[-1][1] == data
        assert (num_copies() == 0) is is_private  # the same slots: the last used is the next


async def test_late_frames_of_a_private_push_leave_zeros(
    server: KvServer, dialer: Dialer, address: DataPlaneAddress
) -> None:
    data, link = payload_of(4096), await dialer.link(address)
    with pytest.raises(FrameRefused):
        await link.send(header(4096), fill_with(data), is_private=True)
    assert not [piece for _, piece in data_of((link, server), without=(data,)) if data in piece]


@pytest.mark.parametrize("is_private", [False, True])
async def test_lost_link_leaves_no_private_frame_in_memory(
    server: KvServer, dialer: Dialer, address: DataPlaneAddress, is_private: bool
) -> None:
    """One frame is in delivery when the link is lost, and others wait."""
    frames = [payload_of(1 << 20, seed=number) for number in range(3)]
    sink = RecordingSink(asyncio.Event())
    link = await dialer.link(address)
    server.expect(b"placement-a", sink, is_private=is_private)

    async def send(number: int, data: bytes) -> None:
        frame = header(len(data), sequence_number=number)
        with pytest.raises(LinkLost):
            await link.send(frame, fill_with(data), is_private=is_private)

    sends = [asyncio.create_task(send(*each)) for each in enumerate(frames)]
    await sink.entered.wait()
    (reception,) = server._receptions
    await eventually(lambda: len(reception.deliveries._waiting) == 2)
    staged = [link._staging.view(slot, 1 << 20) for slot in range(NUM_SLOTS)]
    await link.close()
    await asyncio.gather(*sends)
    await sink.lost.wait()
    assert sink.gate is not None
    sink.gate.set()
    await eventually(lambda: not server._receptions)
    assert [data for _, data in sink.frames] == frames[:1], "a delivery in progress completes"
    of_test = (frames, *frames, sends, sink, sink.frames, *(each for each, _ in sink.frames))
    found = [each for _, each in data_of((link, staged, reception), without=of_test)]
    is_found = [any(data[4096:4160] in piece for piece in found) for data in frames]
    assert any(is_found) is not is_private


async def test_part_of_a_private_frame_is_zeroed_when_its_link_is_lost() -> None:
    data, placements = payload_of(4096), ExpectedPushes()
    placements.expect(b"placement-a", RecordingSink(), is_private=True)
    reception = TcpReception(placements, MonotonicClock())
    buffer = reception.record_arrived(Frame(0, header(len(data))))
    assert buffer is not None
    buffer[:1000] = data[:1000]
    reception.stream.end(LinkLost("cut"))
    assert not any(buffer)
