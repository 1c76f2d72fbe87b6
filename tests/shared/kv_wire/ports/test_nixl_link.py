"""The protocol of the NIXL port, over agents without the wheel. With it: tests/nixl."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest
from structlog.testing import capture_logs

from shared.errors import FrameRefused, LinkLost
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.frames import Frame
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import MAX_FRAME_BYTES
from shared.kv_wire.ports import nixl_port
from shared.kv_wire.ports.nixl_link import NUM_SLOTS, NixlReception
from shared.kv_wire.ports.nixl_port import NixlPort
from shared.kv_wire.ports.push_plan import kv_links
from shared.kv_wire.push_link import StagedLink
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import KvLinks
from shared.randomness import SystemRandomness
from tests.shared.kv_wire.ports.fake_agent import FakeAgent, FakeNetwork
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


@dataclass
class Pair:
    network: FakeNetwork
    server: KvServer
    dialer: Dialer

    async def link(self) -> StagedLink:
        """Over TCP, as between two hosts."""
        return await self.dialer.link(msgspec.structs.replace(self.server.address, unix_path=""))


@asynccontextmanager
async def both(network: FakeNetwork, *, receiver_has: bool = True) -> AsyncIterator[Pair]:
    server = await KvServer.start(
        instance_id=INSTANCE, nixl=await NixlPort.start(network.make) if receiver_has else None
    )
    dialer = Dialer(connect_timeout_s=LIMIT_S, nixl=await NixlPort.start(network.make))
    try:
        yield Pair(network, server, dialer)
    finally:
        await dialer.close()
        await server.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with both(FakeNetwork()) as found:
        yield found
        await found.dialer.close()
        await eventually(lambda: found.network.num_open == 0)  # of both ends, once nothing is read


@pytest.mark.parametrize("num_bytes", [1, 4097, 2 << 20, 8 << 20])
async def test_frame_arrives_unchanged_through_the_sender_s_slots(
    pair: Pair, num_bytes: int
) -> None:
    sink, data = RecordingSink(), payload_of(num_bytes)
    pair.server.expect(b"placement-a", sink)
    link = await pair.link()
    assert (link.plan.port, link.plan.refused) == ("nixl", "")
    assert kv_links(pair.dialer.plans) == (KvLinks("nixl", "same host", 1),)
    for number in range(NUM_SLOTS + 1):
        await link.send(header(num_bytes, sequence_number=number), fill_with(data))
    assert [payload for _, payload in sink.frames] == [data] * (NUM_SLOTS + 1)
    assert sink.frames[0][0].checksum != 0


async def test_concurrent_frames_arrive_each_with_its_own_bytes(pair: Pair) -> None:
    sink = RecordingSink()
    pair.server.expect(b"placement-a", sink)
    link = await pair.link()
    sent = [payload_of(1000 + number, seed=number) for number in range(20)]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(
            *(
                link.send(header(len(data), sequence_number=number), fill_with(data))
                for number, data in enumerate(sent)
            )
        )
    assert [data for _, data in sink.frames] == sent


async def test_slot_that_is_altered_after_its_sum_is_corrupt(pair: Pair) -> None:
    sink, data = RecordingSink(), payload_of(5000)
    pair.server.expect(b"placement-a", sink)
    link = await pair.link()
    pair.network.hangs = True
    send = asyncio.ensure_future(link.send(header(5000), fill_with(data)))
    await eventually(lambda: len(pair.network.under_way) == 1)
    link._staging.view(0, 1 << 20)  # all slots exist
    for slot in range(NUM_SLOTS):
        link._staging.view(slot, 1)[0] ^= 1
    pair.network.hangs = False
    with pytest.raises(FrameRefused, match="checksum"):
        await send
    assert len(sink.corrupted) == pair.server.counts.num_corrupt == 1
    await link.send(header(5000), fill_with(data))
    assert [found for _, found in sink.frames] == [data]


async def test_frame_that_is_sent_twice_ends_the_link_or_is_rejected(pair: Pair) -> None:
    sink = RecordingSink()
    pair.server.expect(b"placement-a", sink)
    link = await pair.link()
    pair.network.hangs = True
    send = asyncio.ensure_future(link.send(header(3), fill_with(b"abc")))
    await eventually(lambda: len(pair.network.under_way) == 1)
    link.stream.send(Frame(1 << 40, header(3), NUM_SLOTS - 1))  # the slot in use
    await sink.lost.wait()
    pair.network.hangs = False
    (error,) = await asyncio.gather(send, return_exceptions=True)
    assert isinstance(error, LinkLost)
    assert len(sink.frames) <= 1  # the delivery in progress completes
    assert pair.server.counts.num_bad_peers == 1


@pytest.mark.parametrize("slot_index", [None, -1, NUM_SLOTS])
async def test_slot_that_does_not_exist_ends_the_link(pair: Pair, slot_index: int | None) -> None:
    link = await pair.link()
    link.stream.send(Frame(0, header(3), slot_index))
    await eventually(lambda: link.is_lost)
    assert pair.server.counts.num_bad_peers == 1
    assert not pair.network.under_way


async def test_failed_read_ends_the_link_and_the_sink_is_told(pair: Pair) -> None:
    sink = RecordingSink()
    pair.server.expect(b"placement-a", sink)
    link = await pair.link()
    pair.network.fails = True
    with pytest.raises(LinkLost):
        await link.send(header(3), fill_with(b"abc"))
    await sink.lost.wait()
    assert (sink.frames, sink.corrupted) == ([], [])
    pair.network.fails = False
    again = await pair.link()
    await again.send(header(3), fill_with(b"abc"))
    assert [data for _, data in sink.frames] == [b"abc"]


async def test_forgotten_placement_does_not_wait_for_a_read_that_hangs(pair: Pair) -> None:
    """A frozen sender serves no reads: decode computes the prompt again meanwhile. What arrives
    later does not reach another frame.
    """
    sink, other = RecordingSink(), RecordingSink()
    pair.server.expect(b"placement-a", sink)
    pair.server.expect(b"placement-b", other)
    link = await pair.link()
    pair.network.hangs = True
    late, data = payload_of(9000, seed=1), payload_of(9000, seed=2)
    send = asyncio.ensure_future(link.send(header(9000), fill_with(late)))
    await eventually(lambda: len(pair.network.under_way) == 1)
    async with asyncio.timeout(DEADLINE_S):
        pair.server.forget(b"placement-a")
        await pair.server.idle(b"placement-a")
        with pytest.raises(FrameRefused, match=r"forgotten|not expected"):
            await send
        again = asyncio.ensure_future(
            link.send(header(9000, placement_id=b"placement-b"), fill_with(data))
        )
        await eventually(lambda: len(pair.network.under_way) == 2)
        destinations = {each.destination for each in pair.network.under_way}
        assert len(destinations) == 2  # the same slot, another buffer
        pair.network.hangs = False
        await again
    assert [found for _, found in other.frames] == [data]
    assert sink.frames == []


async def test_reads_that_never_end_end_the_link_and_keep_their_memory(pair: Pair) -> None:
    link = await pair.link()
    pair.network.hangs = True
    for number in range(NUM_SLOTS):  # nobody expects them, so none is waited for
        with pytest.raises(FrameRefused):
            await link.send(header(3, sequence_number=number), fill_with(b"abc"))
    with pytest.raises(LinkLost):
        await link.send(header(3), fill_with(b"abc"))
    await eventually(lambda: len(pair.network.under_way) == NUM_SLOTS)
    await eventually(lambda: pair.server.num_connections == 0)
    assert pair.network.num_open >= 1  # the receiver's agent has their memory
    pair.network.hangs = False  # the reads fail or end, and only then it is closed


async def test_ended_link_closes_both_agents_once_its_reads_have_ended(pair: Pair) -> None:
    sink = RecordingSink()
    pair.server.expect(b"placement-a", sink)
    link = await pair.link()
    pair.network.hangs = True
    send = asyncio.ensure_future(link.send(header(3), fill_with(b"abc"), is_private=True))
    await eventually(lambda: len(pair.network.under_way) == 1)
    await link.close()
    (error,) = await asyncio.gather(send, return_exceptions=True)
    assert isinstance(error, LinkLost)
    await sink.lost.wait()
    await eventually(lambda: pair.network.num_open == 1)  # the sender's is closed
    pair.network.hangs = False
    await eventually(lambda: pair.network.num_open == 0)


async def test_cancelled_send_frees_its_slot_when_it_is_acknowledged(pair: Pair) -> None:
    sink = RecordingSink()
    pair.server.expect(b"placement-a", sink)
    link = await pair.link()
    pair.network.hangs = True
    sends = [asyncio.ensure_future(link.send(header(3), fill_with(b"abc"))) for _ in range(4)]
    await eventually(lambda: link.num_unacked == NUM_SLOTS)
    for send in sends:
        send.cancel()
    await asyncio.gather(*sends, return_exceptions=True)
    pair.network.hangs = False
    async with asyncio.timeout(DEADLINE_S):
        await link.send(header(3, sequence_number=9), fill_with(b"xyz"))
    assert sink.sequence_numbers == [0, 0, 0, 0, 9]


@pytest.mark.parametrize("is_late", [False, True])
async def test_private_frames_leave_zeros_at_both_ends(pair: Pair, is_late: bool) -> None:
    """Also if the link ends before the read does."""
    sink, data = RecordingSink(), payload_of(4096)
    pair.server.expect(b"placement-a", sink, is_private=True)
    link = await pair.link()
    (reception,) = pair.server._receptions
    assert isinstance(reception, NixlReception)
    memories = (link._staging._slots.registered.memory, reception._reads._registered.memory)
    pair.network.hangs = is_late
    send = asyncio.ensure_future(link.send(header(4096), fill_with(data), is_private=True))
    if is_late:
        await eventually(lambda: len(pair.network.under_way) == 1)
        assert data in memories[0][:]
        await link.close()
        pair.network.hangs = False
    await asyncio.gather(send, return_exceptions=True)
    await eventually(lambda: not pair.network.under_way)
    await eventually(lambda: not any(data[:64] in memory[:] for memory in memories))
    assert len(sink.frames) == (not is_late)


# ── where it does not serve ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fault", ["apart", "hanging"])
async def test_own_port_serves_where_nixl_is_refused_at_the_opening(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_port, "PROBE_S", 0.05)
    network = FakeNetwork(is_apart=fault == "apart", are_probes_hanging=fault == "hanging")
    sink = RecordingSink()
    with capture_logs() as logs:
        async with both(network) as pair:
            pair.server.expect(b"placement-a", sink)
            link = await pair.link()
            await link.send(header(3), fill_with(b"abc"))
            assert (link.plan.port, link.plan.refused) == ("tcp", "nixl")
            assert kv_links(pair.dialer.plans) == (KvLinks("tcp", "same host", 1, "nixl"),)
            network.are_probes_hanging = False
            await eventually(lambda: network.num_open == 0)
    assert [data for _, data in sink.frames] == [b"abc"]
    failed = [each for each in logs if each["event"] == "kv_transport_failed"]
    assert len(failed) == 2 and all(each["instead"] == "tcp" for each in failed)  # one an end


async def test_port_that_does_not_start_is_one_line_in_the_log() -> None:
    with capture_logs() as logs:
        assert await NixlPort.start(FakeNetwork(is_broken=True).make) is None
    (line,) = logs
    assert (line["event"], line["port"]) == ("kv_transport_unavailable", "nixl")
    assert line["reason"] == "nixl agent: no transport"


async def test_agent_that_is_made_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_port, "OPEN_S", 0.05)
    network, may_start = FakeNetwork(), threading.Event()

    def make() -> FakeAgent:
        assert may_start.wait(DEADLINE_S)
        return network.make()

    may_start.set()
    port = await NixlPort.start(make)
    assert port is not None
    may_start.clear()
    with pytest.raises(LinkLost, match="no agent"):
        await port.open_slots(MAX_FRAME_BYTES)
    may_start.set()
    await eventually(lambda: network.num_started == 2 and network.num_open == 0)
    port.close()


async def test_own_port_serves_where_a_sender_has_no_agent_any_more() -> None:
    network, sink = FakeNetwork(), RecordingSink()
    async with both(network) as pair:
        network.is_broken = True
        pair.server.expect(b"placement-a", sink)
        link = await pair.link()
        await link.send(header(3), fill_with(b"abc"))
        assert (link.plan.port, link.plan.refused) == ("tcp", "nixl")


async def test_own_port_serves_where_the_receiver_has_no_nixl() -> None:
    network, sink = FakeNetwork(), RecordingSink()
    async with both(network, receiver_has=False) as pair:
        pair.server.expect(b"placement-a", sink)
        link = await pair.link()
        await link.send(header(3), fill_with(b"abc"))
        assert (link.plan.port, link.plan.refused) == ("tcp", "")
        await eventually(lambda: network.num_open == 0)


async def test_links_of_one_host_and_sealed_ones_do_not_use_it() -> None:
    network, keys = FakeNetwork(), LinkKeys("aead", SystemRandomness())
    port = await NixlPort.start(network.make)
    server = await KvServer.start(instance_id=INSTANCE, link_keys=keys, nixl=port)
    for unix_path, expected in ((server.address.unix_path, "memfd"), ("", "tcp")):
        dialer = Dialer(connect_timeout_s=LIMIT_S, nixl=await NixlPort.start(network.make))
        address = msgspec.structs.replace(server.address, unix_path=unix_path)
        link = await dialer.link(address, keys.key_for("prefill-1"))
        assert (link.plan.port, link.plan.refused) == (expected, "")
        await dialer.close()
    await server.close()
