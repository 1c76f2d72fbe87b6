"""Pushes of tenants that are bound to regions: both ends check before a byte of KV."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from shared.errors import FrameRefused, LinkLost
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import OUTSIDE_REGIONS, PushBounds
from shared.kv_wire.push_link import StagedLink
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.randomness import SystemRandomness
from tests.shared.kv_wire.support import INSTANCE, RecordingSink, eventually, fill_with, header
from tests.support.waiting import LIMIT_S, until

PLACEMENT, EU = b"placement-a", frozenset({"fr", "de"})
DATA = b"kv" * 512


@asynccontextmanager
async def linked(
    transport: str, sender: str, receiver: str, key_region: str | None = None
) -> AsyncIterator[tuple[KvServer, StagedLink]]:
    """A link between processes in two regions. `key_region` is that of the sender's credential."""
    keys = LinkKeys("aead", SystemRandomness()) if "aead" in transport else None
    server = await KvServer.start(instance_id=INSTANCE, link_keys=keys, region=receiver)
    dialer = Dialer(connect_timeout_s=LIMIT_S, region=sender)
    single = {"port": 1} if transport == "memfd" else {"unix_path": ""}
    key = None if keys is None else keys.key_for("prefill-1", key_region or sender)
    try:
        address = msgspec.structs.replace(server.address, **single)
        yield server, await dialer.link(address, key)
    finally:
        await dialer.close()
        await server.close()


transports = pytest.mark.parametrize("transport", ["memfd", "tcp", "tcp aead"])


@transports
async def test_kv_moves_between_regions_of_the_tenant(transport: str) -> None:
    sink = RecordingSink()
    async with linked(transport, "fr", "de") as (server, link):
        assert link.regions == ("fr", "de")
        server.expect(PLACEMENT, sink, PushBounds(EU, "fr"))
        await link.offer(PLACEMENT)
        await link.send(header(len(DATA)), fill_with(DATA))
    assert [payload for _, payload in sink.frames] == [DATA]
    assert server.counts.num_outside == sink.num_outside == 0


@transports
@pytest.mark.parametrize(
    ("sender", "receiver", "expected"),
    [("us", "fr", "us"), ("fr", "us", "fr"), ("de", "fr", "fr"), ("", "fr", "")],
)
async def test_receiver_declines_an_offer_from_elsewhere(
    transport: str, sender: str, receiver: str, expected: str
) -> None:
    sink = RecordingSink()
    async with linked(transport, sender, receiver) as (server, link):
        server.expect(PLACEMENT, sink, PushBounds(EU, expected))
        with pytest.raises(FrameRefused, match=OUTSIDE_REGIONS):
            await link.offer(PLACEMENT)
        assert server.counts.num_outside == sink.num_outside == 1
        server.expect(b"placement-b", sink)  # of a tenant without regions, on the same link
        await link.send(header(len(DATA), placement_id=b"placement-b"), fill_with(DATA))
    assert [each.placement_id for each, _ in sink.frames] == [b"placement-b"]


@transports
async def test_a_sender_that_does_not_offer_is_cut_off(transport: str) -> None:
    sink = RecordingSink()
    async with linked(transport, "us", "fr") as (server, link):
        server.expect(PLACEMENT, sink, PushBounds(EU, "us"))
        with pytest.raises(LinkLost, match=OUTSIDE_REGIONS):
            await link.send(header(len(DATA)), fill_with(DATA))
        assert sink.frames == []
        assert server.counts.num_outside == 1
        await until(lambda: server.num_connections == 0)


async def test_unknown_placement_is_declined() -> None:
    async with linked("tcp", "fr", "fr") as (server, link):
        with pytest.raises(FrameRefused, match="not expected"):
            await link.offer(PLACEMENT)
        assert server.counts.num_unknown == 1


async def test_a_key_is_of_one_region() -> None:
    """Whoever holds the key of a worker in France connects from France, by its own word."""
    with pytest.raises(LinkLost, match="claims the region 'us'; that of its key is 'fr'"):
        async with linked("tcp aead", "us", "fr", key_region="fr"):
            pass


async def test_a_worker_in_another_region_gets_another_key() -> None:
    keys = LinkKeys("aead", SystemRandomness())
    first = keys.key_for("prefill-1", "fr")
    assert keys.key_for("prefill-1", "fr") == first
    second = keys.key_for("prefill-1", "us")
    assert keys.find(first.key_id) is None
    assert keys.region_of(second.key_id) == "us"


async def test_offers_fail_with_their_link() -> None:
    sink = RecordingSink()
    async with linked("tcp", "fr", "fr") as (server, link):
        server.expect(PLACEMENT, sink, PushBounds(EU, "fr"))
        await server.close()
        await eventually(lambda: link.is_lost)
        with pytest.raises(LinkLost):
            await link.offer(PLACEMENT)
