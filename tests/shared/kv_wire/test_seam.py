"""Behaviour of every implementation of the KV link: shared memory, TCP and the simulated one."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import FrameRefused, LinkLost, NoCapacity
from shared.kv_wire.frames import MAX_FRAME_BYTES
from shared.kv_wire.push_link import StagedLink
from tests.shared.kv_wire.conftest import Pair
from tests.shared.kv_wire.support import (
    DEADLINE_S,
    RecordingSink,
    fill_with,
    header,
    payload_of,
)

MIB = 1 << 20
SIZES = (1, 63, 4095, 4097, 65536, 65537, 262145, MIB + 1, 4 * MIB, MAX_FRAME_BYTES)


@pytest.mark.parametrize("num_bytes", SIZES)
async def test_frame_arrives_unchanged(pair: Pair, num_bytes: int) -> None:
    sink, data = RecordingSink(), payload_of(num_bytes)
    pair.receiver.expect(b"placement-a", sink)
    link = await pair.dialer.link(pair.address)
    await link.send(header(num_bytes), fill_with(data))
    ((arrived, payload),) = sink.frames
    assert payload == data
    assert arrived.payload_bytes == num_bytes
    is_sealed = isinstance(link, StagedLink) and link.stream.ciphers is not None
    assert (arrived.checksum == 0) is is_sealed


@pytest.mark.parametrize("num_bytes", [-1, 0, MAX_FRAME_BYTES + 1, 1 << 40])
async def test_invalid_size_is_rejected_before_fill(pair: Pair, num_bytes: int) -> None:
    async def fill(view: memoryview) -> None:
        raise AssertionError("nothing should be filled")

    link = await pair.dialer.link(pair.address)
    with pytest.raises(FrameRefused, match="payload"):
        await link.send(header(num_bytes), fill)


async def test_interleaved_placements_arrive_in_order(pair: Pair) -> None:
    sinks = {f"placement-{i}".encode(): RecordingSink() for i in range(20)}
    for placement_id, sink in sinks.items():
        pair.receiver.expect(placement_id, sink)
    link = await pair.dialer.link(pair.address)
    sends = [
        link.send(
            header(1000 + 7 * number, placement_id=placement_id, sequence_number=number),
            fill_with(payload_of(1000 + 7 * number, seed=number)),
        )
        for number in range(10)
        for placement_id in sinks
    ]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*sends)
    for sink in sinks.values():
        assert sink.sequence_numbers == list(range(10))
        assert all(data == payload_of(len(data), h.sequence_number) for h, data in sink.frames)


async def test_unknown_placement_is_rejected_without_link_loss(pair: Pair) -> None:
    sink = RecordingSink()
    pair.receiver.expect(b"placement-a", sink)
    link = await pair.dialer.link(pair.address)
    with pytest.raises(FrameRefused, match="not expected"):
        await link.send(header(5000, placement_id=b"nobody"), fill_with(bytes(5000)))
    await link.send(header(3), fill_with(b"abc"))
    assert [data for _, data in sink.frames] == [b"abc"]
    assert pair.receiver.counts.num_unknown == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [NoCapacity("no room for it"), ValueError("no room for it")])
async def test_sink_error_rejects_frame_with_reason(pair: Pair, error: Exception) -> None:
    sink = RecordingSink()
    sink.rejection = error
    pair.receiver.expect(b"placement-a", sink)
    link = await pair.dialer.link(pair.address)
    with pytest.raises(FrameRefused, match="no room for it"):
        await link.send(header(3), fill_with(b"abc"))
    sink.rejection = None
    await link.send(header(3), fill_with(b"abc"))
    assert pair.receiver.counts.num_rejected == 1  # type: ignore[attr-defined]


async def test_failed_fill_leaves_link_usable(pair: Pair) -> None:
    async def fill(view: memoryview) -> None:
        raise RuntimeError("the source is gone")

    pair.receiver.expect(b"placement-a", RecordingSink())
    link = await pair.dialer.link(pair.address)
    for _ in range(10):  # more times than there are slots
        with pytest.raises(RuntimeError, match="gone"):
            await link.send(header(3), fill)
    await link.send(header(3), fill_with(b"abc"))


async def test_idle_waits_for_delivery_after_forget(pair: Pair) -> None:
    gate = asyncio.Event()
    sink = RecordingSink(gate)
    pair.receiver.expect(b"placement-a", sink)
    link = await pair.dialer.link(pair.address)
    send = asyncio.ensure_future(link.send(header(3), fill_with(b"abc")))
    async with asyncio.timeout(DEADLINE_S):
        await sink.entered.wait()
        pair.receiver.forget(b"placement-a")
        pair.receiver.forget(b"placement-a")
        idle = asyncio.ensure_future(pair.receiver.idle(b"placement-a"))
        await asyncio.sleep(0)
        assert not idle.done()
        gate.set()
        await idle
        await send
        await pair.receiver.idle(b"placement-a")
    assert len(sink.frames) == 1
    with pytest.raises(FrameRefused, match="not expected"):
        await link.send(header(3), fill_with(b"abc"))


async def test_placement_cannot_be_expected_twice(pair: Pair) -> None:
    pair.receiver.expect(b"placement-a", RecordingSink())
    with pytest.raises(ValueError, match="expected already"):
        pair.receiver.expect(b"placement-a", RecordingSink())


async def test_lost_link_notifies_sinks_once_and_fails_sends(pair: Pair) -> None:
    gate = asyncio.Event()
    busy, used, idle = RecordingSink(gate), RecordingSink(), RecordingSink()
    for placement_id, sink in ((b"busy", busy), (b"used", used), (b"idle", idle)):
        pair.receiver.expect(placement_id, sink)
    link = await pair.dialer.link(pair.address)
    await link.send(header(3, placement_id=b"used"), fill_with(b"abc"))
    sends = [
        asyncio.ensure_future(link.send(header(3, placement_id=b"busy"), fill_with(b"abc")))
        for _ in range(12)
    ]
    async with asyncio.timeout(DEADLINE_S):
        await busy.entered.wait()
        await link.close()
        results = await asyncio.gather(*sends, return_exceptions=True)
        await busy.lost.wait()
        await used.lost.wait()
    assert [type(result) for result in results] == [LinkLost] * 12
    with pytest.raises(LinkLost):
        await link.send(header(3), fill_with(b"abc"))
    gate.set()
    await pair.receiver.close()
    assert (busy.num_lost, used.num_lost, idle.num_lost) == (1, 1, 0)


async def test_dialer_shares_one_link_and_redials_after_loss(pair: Pair) -> None:
    pair.receiver.expect(b"placement-a", RecordingSink())
    first, second = await asyncio.gather(
        pair.dialer.link(pair.address), pair.dialer.link(pair.address)
    )
    assert first is second
    await first.close()
    third = await pair.dialer.link(pair.address)
    assert third is not first
    await third.send(header(3), fill_with(b"abc"))


async def test_closed_receiver_is_unreachable(pair: Pair) -> None:
    await pair.receiver.close()
    with pytest.raises(LinkLost):
        await pair.dialer.link(pair.address)
