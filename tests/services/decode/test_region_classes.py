"""What workers send of a tenant with a region class, on which subjects."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shared.errors import UnknownPlacement
from shared.messages import BlockPage, ListBlocks
from shared.regions.region_check import RegionCheck
from shared.regions.region_classes import region_classes
from shared.subjects import class_of, list_blocks
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import run
from tests.support.world.kv_link import DataPlane
from tests.support.world.workers import Peer, SimulatedWorker, request_of

CLASSES = region_classes(["eu=fr"])
PROMPT = list(range(100, 164))  # four blocks
DATA = {"start", "run", "tokens", "kv_events"}


def test_worker_names_the_class_in_all_data_of_its_tenant() -> None:
    async def test() -> None:
        network, plane = SimulatedNetwork(), DataPlane()
        peer = Peer(network, regions=RegionCheck("fr", CLASSES))
        prefill, decode = (
            SimulatedWorker(network, plane, f"{role}-1", (role,), region="fr", classes=CLASSES)
            for role in ("prefill", "decode")
        )
        for each in (prefill, decode, peer):
            await each.start()
        await asyncio.sleep(1.5)  # they have heard each other
        bound = msgspec.structs.replace(
            request_of(PROMPT), region_class="eu", allowed_regions=("fr",)
        )
        placed = await peer.place("decode-1", bound, ("prefill-1",))
        first = await peer.finished(placed)
        assert first.served is not None and first.served.prefill_worker_id == "prefill-1"
        await peer.resend("decode-1", placed, 0, region_class="eu")
        with pytest.raises(UnknownPlacement):
            await peer.resend("decode-1", placed, 0)
        sent = {(subject.rpartition(".")[2], class_of(subject)) for _, _, subject in network.log}
        assert {each for each in sent if each[0] in DATA} == {(verb, "eu") for verb in DATA}
        assert ("resend", "eu") in sent
        network.log.clear()
        await peer.finished(await peer.place("decode-1", request_of(PROMPT, tenant_id="tenant-b")))
        sent = {(subject.rpartition(".")[2], class_of(subject)) for _, _, subject in network.log}
        assert {each[1] for each in sent if each[0] in DATA} == {""}
        tenants = {each: await held_tenants(peer, each) for each in ("", "eu")}
        assert tenants == {"": {"tenant-b"}, "eu": {"tenant-a"}}
        load = decode.worker._load()
        assert load.num_kv_events > 0 and dict(load.num_class_kv_events)["eu"] > 0
        for each in (peer, decode, prefill):
            await each.stop()

    run(test())


async def held_tenants(peer: Peer, region_class: str) -> set[str]:
    """The tenants whose blocks the decode worker lists."""
    question = ListBlocks(region_class=region_class)
    subject = list_blocks("decode", "decode-1")
    page = await peer.bus.request(subject, question, BlockPage, timeout_s=1.0)
    return {each.tenant_id for each in page.stored}
