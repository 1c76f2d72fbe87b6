"""The faults that the simulated link adds; the common behaviour is tested in `test_seam`."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import FrameRefused, LinkLost
from tests.shared.kv_wire.support import DEADLINE_S, RecordingSink, fill_with, header
from tests.support.world.kv_link import DataPlane, SimulatedDialer, SimulatedReceiver


async def test_next_frame_of_a_placement_can_be_corrupted() -> None:
    network = SimulatedDialer()
    receiver = SimulatedReceiver(network, b"decode-1")
    faulty, healthy = RecordingSink(), RecordingSink()
    receiver.expect(b"sick", faulty)
    receiver.expect(b"well", healthy)
    receiver.corrupt_next(b"sick")
    link = await network.link(receiver.address)
    await link.send(header(3, placement_id=b"well"), fill_with(b"abc"))
    with pytest.raises(FrameRefused, match="checksum"):
        await link.send(header(3, placement_id=b"sick"), fill_with(b"abc"))
    await link.send(header(3, placement_id=b"sick"), fill_with(b"abc"))
    assert (len(faulty.corrupted), len(faulty.frames)) == (1, 1)
    assert (len(healthy.corrupted), len(healthy.frames)) == (0, 1)


async def test_dropped_links_fail_sends_and_can_be_redialled() -> None:
    network = SimulatedDialer()
    receiver = SimulatedReceiver(network, b"decode-1")
    sink = RecordingSink(gate=asyncio.Event())
    receiver.expect(b"placement-a", sink)
    link = await network.link(receiver.address)
    sends = [asyncio.ensure_future(link.send(header(3), fill_with(b"abc"))) for _ in range(3)]
    async with asyncio.timeout(DEADLINE_S):
        await sink.entered.wait()
        receiver.drop_links()
        results = await asyncio.gather(*sends, return_exceptions=True)
    assert [type(result) for result in results] == [LinkLost] * 3
    assert sink.num_lost == 1
    assert not (await network.link(receiver.address)).is_lost


async def test_link_that_ends_on_the_way_to_its_sender_fails_sends() -> None:
    network = SimulatedDialer(DataPlane(distance_s=lambda sender, receiver: 0.02))
    receiver = SimulatedReceiver(network, b"decode-1")
    receiver.expect(b"placement-a", RecordingSink())
    dial = asyncio.ensure_future(network.link(receiver.address))
    while not receiver._ends:
        await asyncio.sleep(0.001)
    receiver.drop_links()  # its reply has not arrived
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(LinkLost):
            await (await dial).send(header(3), fill_with(b"abc"))


async def test_absent_instance_cannot_be_dialled() -> None:
    network = SimulatedDialer()
    receiver = SimulatedReceiver(network, b"decode-1")
    del network.receivers[b"decode-1"]
    with pytest.raises(LinkLost):
        await network.link(receiver.address)
