"""The memory of a link from and to which a device copies is page-locked while it is mapped."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared.errors import FrameRefused
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import DEVICE_FRAME_BYTES, FRAME_BYTES, FRAMES_UNDER_WAY, FrameHeader
from shared.kv_wire.push_link import StagedLink
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.kv_wire.shared_memory import NUM_SLOTS
from shared.randomness import SystemRandomness
from tests.shared.kv_wire.support import (
    DEADLINE_S,
    INSTANCE,
    RecordingSink,
    eventually,
    fill_with,
    header,
    payload_of,
)
from tests.support.waiting import LIMIT_S


def address_of(memory: memoryview) -> int:
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data


def is_mapped(start: int, num_bytes: int) -> bool:
    """Whether one mapping of this process has all of these bytes."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, end = line.split()[0].partition("-")
        if int(first, 16) <= start and start + num_bytes <= int(end, 16):
            return True
    return False


class FakeLock:
    """A `PageLock` that checks what is unlocked. `limit` is the largest memory that it can lock."""

    device = "GPU-1"

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.locked: dict[int, int] = {}  # address -> bytes
        self.unlocked: list[bool] = []  # whether it was still mapped
        self.num_copied_bytes = 0

    def lock(self, memory: memoryview) -> Callable[[], None] | None:
        address, num_bytes = address_of(memory), memory.nbytes
        if num_bytes > self.limit:
            return None
        assert address not in self.locked
        self.locked[address] = num_bytes
        return lambda: self._unlock(address)

    def copy(self, destination: memoryview, source: memoryview) -> None:
        destination[:] = source
        self.num_copied_bytes += len(source)

    def covers(self, memory: memoryview) -> bool:
        start = address_of(memory)
        return any(
            first <= start and start + memory.nbytes <= first + num_bytes
            for first, num_bytes in self.locked.items()
        )

    def _unlock(self, address: int) -> None:
        self.unlocked.append(is_mapped(address, self.locked.pop(address)))


class CheckingSink(RecordingSink):
    """Checks that each frame lies in locked memory."""

    def __init__(self, lock: FakeLock) -> None:
        super().__init__()
        self.lock = lock
        self.are_locked: list[bool] = []

    async def frame(self, header: FrameHeader, payload: memoryview) -> None:
        self.are_locked.append(self.lock.covers(payload))
        await super().frame(header, payload)


@asynccontextmanager
async def link_with(
    sender: FakeLock,
    receiver: FakeLock,
    sink: RecordingSink,
    *,
    is_tcp: bool = False,
    link_keys: LinkKeys | None = None,
) -> AsyncIterator[StagedLink]:
    server = await KvServer.start(instance_id=INSTANCE, page_lock=receiver, link_keys=link_keys)
    dialer = Dialer(connect_timeout_s=LIMIT_S, page_lock=sender)
    server.expect(b"placement-a", sink)
    address = msgspec.structs.replace(
        server.address, **({"unix_path": ""} if is_tcp else {"port": 1})
    )
    try:
        link_key = None if link_keys is None else link_keys.key_for("prefill-1")
        yield await dialer.link(address, link_key)
    finally:
        await dialer.close()
        await server.close()


async def test_slots_and_private_buffer_are_locked_until_they_are_unmapped() -> None:
    sender, receiver = FakeLock(), FakeLock()
    sink = CheckingSink(receiver)
    async with link_with(sender, receiver, sink) as link:
        assert list(sender.locked.values()) == [NUM_SLOTS * DEVICE_FRAME_BYTES]
        assert (link.frame_bytes, link.frames_under_way) == (DEVICE_FRAME_BYTES, NUM_SLOTS - 1)
        assert link.plan.place == "same GPU"
        for num_bytes in (3, link.frame_bytes, 70_000):
            data = payload_of(num_bytes)
            await link.send(header(num_bytes), fill_with(data))
            assert sink.frames.pop()[1] == data
        assert sink.are_locked == [True] * 3
        assert list(receiver.locked.values()) == [DEVICE_FRAME_BYTES]  # one slot was enough
        assert (sender.unlocked, receiver.unlocked) == ([], [])
    del link
    gc.collect()
    await eventually(lambda: len(sender.unlocked) == len(receiver.unlocked) == 1)
    assert all(sender.unlocked + receiver.unlocked)
    assert not sender.locked and not receiver.locked


@pytest.mark.parametrize("security", ["none", "aead"])
async def test_buffers_of_tcp_are_locked_and_large_frames_arrive_unchanged(security: str) -> None:
    link_keys = LinkKeys("aead", SystemRandomness()) if security == "aead" else None
    sender, receiver = FakeLock(), FakeLock()
    sink = CheckingSink(receiver)
    async with link_with(sender, receiver, sink, is_tcp=True, link_keys=link_keys) as link:
        assert (link.frame_bytes, link.plan.port) == (DEVICE_FRAME_BYTES, "tcp")
        data = payload_of(link.frame_bytes)
        await link.send(header(len(data)), fill_with(data))
        assert sink.frames.pop()[1] == data
        assert sink.are_locked == [True]
        assert len(sender.locked) == len(receiver.locked) == 1
        with pytest.raises(FrameRefused, match="payload"):
            await link.send(header(DEVICE_FRAME_BYTES + 1), fill_with(data))


async def test_frames_are_copied_while_another_is_delivered() -> None:
    receiver, gate = FakeLock(), asyncio.Event()
    sink = RecordingSink(gate)
    sent = [payload_of(2 << 20, seed=number) for number in range(NUM_SLOTS)]
    async with link_with(FakeLock(), receiver, sink) as link:
        sends = [
            asyncio.ensure_future(link.send(header(len(data)), fill_with(data))) for data in sent
        ]
        async with asyncio.timeout(DEADLINE_S):
            await sink.entered.wait()
            await eventually(lambda: receiver.num_copied_bytes == sum(map(len, sent)))
            assert sink.frames == []
            gate.set()
            await asyncio.gather(*sends)
    assert [data for _, data in sink.frames] == sent


class SlowFirstCopy(FakeLock):
    """The first copy has read its source when it waits for `may_end`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end, self.has_ended = threading.Event(), threading.Event()

    def copy(self, destination: memoryview, source: memoryview) -> None:
        if self.may_end.is_set() or self.num_copied_bytes:
            super().copy(destination, source)
            return
        self.num_copied_bytes += len(source)
        self.first, read = destination, bytes(source)
        assert self.may_end.wait(DEADLINE_S)
        destination[:] = read
        self.has_ended.set()


class LateSink(RecordingSink):
    """Reads a frame once the first copy has ended."""

    def __init__(self, lock: SlowFirstCopy) -> None:
        super().__init__()
        self.lock = lock

    async def frame(self, header: FrameHeader, payload: memoryview) -> None:
        assert await asyncio.to_thread(self.lock.has_ended.wait, DEADLINE_S)
        await super().frame(header, payload)


async def test_copy_of_a_rejected_frame_does_not_reach_the_next_one() -> None:
    receiver = SlowFirstCopy()
    sink = LateSink(receiver)
    async with link_with(FakeLock(), receiver, sink) as link:
        first, second = payload_of(5000, seed=1), payload_of(5000, seed=2)
        with pytest.raises(FrameRefused):
            unknown = header(len(first), placement_id=b"placement-b")
            await link.send(unknown, fill_with(first))
        asyncio.get_running_loop().call_later(0.1, receiver.may_end.set)
        await link.send(header(len(second)), fill_with(second))  # in the same slot
    assert [data for _, data in sink.frames] == [second]


async def test_copy_of_a_rejected_frame_is_zeroed_when_it_has_ended() -> None:
    """It may be a late frame of a tenant with zero retention."""
    receiver = SlowFirstCopy()
    async with link_with(FakeLock(), receiver, RecordingSink()) as link:
        unknown = header(5000, placement_id=b"placement-b")
        with pytest.raises(FrameRefused):
            await link.send(unknown, fill_with(payload_of(5000)), is_private=True)
        await eventually(lambda: receiver.num_copied_bytes == 5000)
        receiver.may_end.set()
        assert await asyncio.to_thread(receiver.has_ended.wait, DEADLINE_S)
        await eventually(lambda: not any(receiver.first))


async def test_slot_that_is_being_filled_stays_locked_after_the_link_has_ended() -> None:
    sender = FakeLock()
    has_started, may_end = asyncio.Event(), asyncio.Event()

    async def fill(view: memoryview) -> None:
        has_started.set()
        await may_end.wait()
        assert sender.covers(view)

    async with link_with(sender, FakeLock(), RecordingSink()) as link:
        send = asyncio.ensure_future(link.send(header(3), fill))
        async with asyncio.timeout(DEADLINE_S):
            await has_started.wait()
            await link.close()
            assert sender.locked and not sender.unlocked
            may_end.set()
            (error,) = await asyncio.gather(send, return_exceptions=True)
        assert "this end closed the link" in str(error)
    del link, send, error
    gc.collect()
    await eventually(lambda: sender.unlocked == [True])


@pytest.mark.parametrize("is_tcp", [False, True])
async def test_frames_arrive_unchanged_without_locked_memory(is_tcp: bool) -> None:
    sender, receiver, sink = FakeLock(limit=0), FakeLock(limit=0), RecordingSink()
    async with link_with(sender, receiver, sink, is_tcp=is_tcp) as link:
        if not is_tcp:  # there the lock is only tried when a frame needs a buffer
            assert (link.frame_bytes, link.frames_under_way) == (FRAME_BYTES, FRAMES_UNDER_WAY)
        data = payload_of(3 << 20)
        await link.send(header(len(data)), fill_with(data))
        assert sink.frames.pop()[1] == data
