"""Sealed TCP links: who may open one, and what someone on the path can read or change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest

from shared.errors import FrameRefused, LinkLost
from shared.kv_wire.dialer import DataPlaneSecurity, Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import DataPlaneAddress, LinkKey, LinkSecurity
from shared.randomness import SystemRandomness
from tests.shared.kv_wire.support import (
    INSTANCE,
    RecordingSink,
    eventually,
    fill_with,
    header,
    payload_of,
)
from tests.support.recording_relay import RecordingRelay, recording_relay
from tests.support.waiting import LIMIT_S

DATA = payload_of(5000)


@dataclass(frozen=True)
class SealedPair:
    server: KvServer
    dialer: Dialer
    relay: RecordingRelay
    address: DataPlaneAddress  # of the relay
    link_key: LinkKey | None
    sink: RecordingSink

    async def push(self, link_key: LinkKey | None) -> None:
        link = await self.dialer.link(self.address, link_key)
        await link.send(header(len(DATA)), fill_with(DATA))

    async def is_refused(self, link_key: LinkKey | None, reason: str | None = None) -> bool:
        """Whether a push fails for this reason, and its frame has not reached the sink."""
        with pytest.raises((LinkLost, FrameRefused), match=reason):
            await self.push(link_key)
        return not self.sink.frames


@asynccontextmanager
async def sealed_pair(
    security: DataPlaneSecurity, *, required: DataPlaneSecurity = "none"
) -> AsyncIterator[SealedPair]:
    link_keys = None if security == "none" else LinkKeys(security, SystemRandomness())
    server = await KvServer.start(instance_id=INSTANCE, link_keys=link_keys)
    dialer, sink = Dialer(connect_timeout_s=LIMIT_S, security=required), RecordingSink()
    server.expect(b"placement-a", sink)
    link_key = None if link_keys is None else link_keys.key_for("prefill-1")
    async with recording_relay(server.address) as (relay, address):
        yield SealedPair(server, dialer, relay, address, link_key, sink)
        await dialer.close()
        await server.close()


@pytest.mark.parametrize(("security", "is_readable"), [("aead", 0), ("mac", 1), ("none", 1)])
async def test_only_encrypted_kv_is_hidden_from_the_path(
    security: DataPlaneSecurity, is_readable: bool
) -> None:
    async with sealed_pair(security) as pair:
        await pair.push(pair.link_key)
        assert [data for _, data in pair.sink.frames] == [DATA]
        windows = {DATA[start : start + 16] for start in range(0, len(DATA) - 16, 16)}
        assert any(window in pair.relay.recorded for window in windows) is bool(is_readable)
        assert (b"placement-a" in pair.relay.recorded) is bool(is_readable)
        if pair.link_key is not None:
            assert pair.link_key.key not in pair.relay.recorded


@pytest.mark.parametrize("security", ["aead", "mac"])
@pytest.mark.parametrize("kind", ["record", "payload"])
async def test_altered_frame_does_not_reach_the_sink(security: LinkSecurity, kind: str) -> None:
    def flip_a_late_bit(data: bytes) -> bytes:
        at = -100 if kind == "payload" else 20  # the record is first, or alone
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    async with sealed_pair(security) as pair:
        link = await pair.dialer.link(pair.address, pair.link_key)
        pair.relay.to_receiver = flip_a_late_bit
        with pytest.raises((FrameRefused, LinkLost), match=r"failed its checksum|not the next"):
            await link.send(header(len(DATA)), fill_with(DATA))
        assert not pair.sink.frames
        counts = pair.server.counts
        assert counts.num_corrupt + counts.num_bad_peers == 1


async def test_altered_handshake_breaks_the_link() -> None:
    """The Welcome is readable; here, someone on the path lowers the number of slots in it."""
    async with sealed_pair("aead") as pair:
        pair.relay.to_sender = lambda data: data.replace(b"num_slots\x04", b"num_slots\x03")
        assert await pair.is_refused(pair.link_key, "not the next|closed")


async def test_links_without_the_right_key_are_refused() -> None:
    async with sealed_pair("aead") as pair:
        assert pair.link_key is not None
        unknown = msgspec.structs.replace(pair.link_key, key_id=b"?" * 16)
        foreign = msgspec.structs.replace(pair.link_key, key=bytes(32))
        weaker = msgspec.structs.replace(pair.link_key, security="mac")
        assert await pair.is_refused(None, "no link key")
        assert await pair.is_refused(unknown, "the link key is unknown here")
        assert await pair.is_refused(foreign)
        assert await pair.is_refused(weaker)
        await eventually(lambda: pair.server.num_connections == 0)
        await pair.push(pair.link_key)
        assert len(pair.sink.frames) == 1


async def test_key_for_a_receiver_without_keys_is_refused() -> None:
    async with sealed_pair("none") as pair:
        link_key = LinkKeys("aead", SystemRandomness()).key_for("prefill-1")
        assert await pair.is_refused(link_key, "links to this receiver are not sealed")


@pytest.mark.parametrize(
    ("offered", "required", "is_accepted"),
    [
        *(("none", "mac", False), ("none", "aead", False), ("mac", "aead", False)),
        *(("aead", "mac", True), ("mac", "none", True), ("mac", "mac", True)),
    ],
)
async def test_sender_requires_its_own_security(
    offered: DataPlaneSecurity, required: DataPlaneSecurity, is_accepted: bool
) -> None:
    async with sealed_pair(offered, required=required) as pair:
        if is_accepted:
            await pair.push(pair.link_key)
        else:
            reason = f"has data-plane security {offered}, this worker requires {required}"
            assert await pair.is_refused(pair.link_key, reason)
            assert not pair.relay.recorded


async def test_unix_socket_is_not_sealed() -> None:
    async with sealed_pair("aead", required="aead") as pair:
        link = await pair.dialer.link(pair.server.address, pair.link_key)
        assert link.stream.ciphers is None
        await link.send(header(len(DATA)), fill_with(DATA))
        assert [data for _, data in pair.sink.frames] == [DATA]


async def test_each_connection_has_keys_of_its_own() -> None:
    """What was recorded of one connection is refused on the next one."""
    async with sealed_pair("aead") as pair:
        await pair.push(pair.link_key)
        await pair.dialer.close()
        first = bytes(pair.relay.recorded)
        dialer = Dialer(connect_timeout_s=LIMIT_S)
        link = await dialer.link(pair.address, pair.link_key)
        replayed = first[first.index(b"HKVW", 4) :]
        pair.relay.to_receiver = lambda data: replayed[: len(data)]
        with pytest.raises(LinkLost):
            await link.send(header(len(DATA)), fill_with(DATA))
        assert len(pair.sink.frames) == 1
        await dialer.close()
