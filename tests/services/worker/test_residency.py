"""Workers in several regions, with the checks of one kind of process after the other switched off.

Whatever is left refuses before a byte of KV, and the prompt is computed by the decode worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import pytest

from shared.engine.kv.kv_sender import KvSender
from shared.errors import OutsideRegions
from shared.kv_wire.link import PushLink
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import BlockPage, Heartbeat, KvEvents, ListBlocks, ResidencyRefusals
from shared.packing import BLOCK_HASH_BYTES
from shared.subjects import KV_EVENTS, list_blocks
from tests.services.decode.test_handoff import PROMPT
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import VirtualClock, run
from tests.support.world.kv_link import DataPlane
from tests.support.world.randomness import SeededRandomness
from tests.support.world.workers import Peer, Received, SimulatedWorker, request_of

EU = ("de", "fr")


@dataclass
class Outcome:
    received: Received
    at_prefill: tuple[ResidencyRefusals, ...]
    at_decode: tuple[ResidencyRefusals, ...]
    num_frames: int

    @property
    def num_pushed_tokens(self) -> int:
        assert self.received.finish is not None
        assert len(self.received.output) == 20
        return self.received.finish.served.num_pushed_tokens


def unchecked(worker: SimulatedWorker) -> None:
    """A worker whose process has lost its checks of requests."""
    refusals = worker.worker.health_monitor.refusals
    refusals.check = lambda *_: None  # type: ignore[method-assign]


def outcome(
    prefill_region: str,
    *careless: str,
    allowed: tuple[str, ...] = EU,
    before: Callable[[], object] = lambda: None,
) -> Outcome:
    """A request that a worker in fr decodes, of a tenant in the regions `allowed`."""

    async def main() -> Outcome:
        network, plane = SimulatedNetwork(), DataPlane()
        prefill = SimulatedWorker(network, plane, "prefill-1", ("prefill",), region=prefill_region)
        decode = SimulatedWorker(network, plane, "decode-1", ("decode",), region="fr")
        peer = Peer(network)
        for each in (peer, prefill, decode):
            await each.start()
        await asyncio.sleep(2)  # virtual: heartbeats have arrived
        for worker in (prefill, decode):
            if worker.worker_id in careless:
                unchecked(worker)
        before()
        request = msgspec.structs.replace(request_of(PROMPT), allowed_regions=allowed)
        placement_id = await peer.place("decode-1", request, ("prefill-1",))
        received = await peer.finished(placement_id)
        heartbeats = [each.worker.health_monitor.describe() for each in (prefill, decode)]
        counts = decode.receiver.counts
        for each in (prefill, decode, peer):
            await each.stop()
        return Outcome(received, *(each.refusals for each in heartbeats), counts.num_frames)

    return run(main())


def refused(check: str, region: str) -> tuple[ResidencyRefusals, ...]:
    return (ResidencyRefusals(check, "tenant-a", region, 1),)


@pytest.mark.parametrize(("prefill_region", "allowed"), [("de", EU), ("fr", ("fr",)), ("us", ())])
def test_kv_comes_from_a_region_of_the_tenant(
    prefill_region: str, allowed: tuple[str, ...]
) -> None:
    found = outcome(prefill_region, allowed=allowed)
    assert found.num_pushed_tokens == len(PROMPT) - 1
    assert found.at_prefill == found.at_decode == ()


@pytest.mark.parametrize("region", ["us", ""])
def test_decode_asks_no_worker_elsewhere(region: str) -> None:
    found = outcome(region)
    assert (found.num_pushed_tokens, found.num_frames) == (0, 0)
    assert found.at_decode == refused("decode", region)
    assert found.at_prefill == ()


def test_prefill_refuses_if_decode_does_not_check() -> None:
    found = outcome("us", "decode-1")
    assert (found.num_pushed_tokens, found.num_frames) == (0, 0)
    assert found.at_prefill == refused("prefill", "us")


def test_the_sender_refuses_if_neither_worker_checks() -> None:
    found = outcome("us", "decode-1", "prefill-1")
    assert (found.num_pushed_tokens, found.num_frames) == (0, 0)
    assert found.at_prefill == refused("kv_push", "fr")


def test_the_receiver_refuses_if_the_sender_does_not_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def open_unchecked(self: KvSender, link: PushLink) -> None:
        await link.offer(self._placement_id)

    found = outcome(
        "us",
        "decode-1",
        "prefill-1",
        before=lambda: monkeypatch.setattr(KvSender, "_open", open_unchecked),
    )
    assert (found.num_pushed_tokens, found.num_frames) == (0, 0)
    assert found.at_decode == refused("kv_receive", "us")


def test_a_worker_elsewhere_takes_no_request() -> None:
    with pytest.raises(OutsideRegions, match="decode: the region 'fr' is none of those"):
        outcome("us", allowed=("us",))


@pytest.mark.parametrize(
    ("index_region", "is_announced"), [("fr", True), ("us", False), ("", False), (None, True)]
)
def test_hashes_reach_no_index_elsewhere(index_region: str | None, is_announced: bool) -> None:
    """Of a tenant with allowed regions and no class, whose blocks have no subject of their own."""

    async def main() -> None:
        network, plane = SimulatedNetwork(), DataPlane()
        decode = SimulatedWorker(network, plane, "decode-1", ("decode",), region="fr")
        indexes = [] if index_region is None else [index_of(network, index_region)]
        peer, heard = Peer(network), list[KvEvents]()
        await peer.bus.subscribe(KV_EVENTS, KvEvents, heard.append)
        for each in (peer, decode, *indexes):
            await each.start()
        for each in indexes:
            await each.transition_to("ready")
        await asyncio.sleep(2)  # virtual: heartbeats have arrived
        request = msgspec.structs.replace(request_of(PROMPT), allowed_regions=EU)
        placement_id = await peer.place("decode-1", request)
        await peer.finished(placement_id)
        await asyncio.sleep(1)
        assert bool(heard) is is_announced
        assert decode.engine.pool.num_blocks_of("tenant-a") > 0  # it is cached all the same
        late = index_of(network, "us")
        await late.start()
        await late.transition_to("ready")
        await asyncio.sleep(1)
        page = await peer.bus.request(
            list_blocks("decode", "decode-1"), ListBlocks(), BlockPage, timeout_s=1.0
        )
        assert page.stored == ()  # neither may an index have them that joins later
        for each in (decode, peer, *indexes, late):
            await each.stop()

    run(main())


def test_a_list_of_many_blocks_reads_the_fleet_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 65,536 blocks of such tenants and 300 workers it was read for seconds."""

    async def main() -> None:
        network, plane = SimulatedNetwork(), DataPlane()
        decode = SimulatedWorker(network, plane, "decode-1", ("decode",), region="fr")
        peer = Peer(network)
        for each in (peer, decode):
            await each.start()
        await asyncio.sleep(2)  # virtual: heartbeats have arrived
        request = msgspec.structs.replace(request_of(PROMPT), allowed_regions=EU)
        await peer.finished(await peer.place("decode-1", request))
        fleet, num_read = decode.worker.health_monitor.fleet, 0
        everyone = fleet.everyone

        def counted() -> Iterator[Heartbeat]:
            nonlocal num_read
            num_read += 1
            return everyone()

        monkeypatch.setattr(fleet, "everyone", counted)
        page = decode.worker._block_page(ListBlocks())
        assert sum(len(each.block_hashes) for each in page.stored) > BLOCK_HASH_BYTES
        assert num_read == 1
        for process in (decode, peer):
            await process.stop()

    run(main())


def index_of(network: SimulatedNetwork, region: str) -> HealthMonitor:
    bus = network.bus(f"index-{region or 'nowhere'}")
    return HealthMonitor(
        bus, VirtualClock(), SeededRandomness(3), roles=("kv_index",), region=region
    )
