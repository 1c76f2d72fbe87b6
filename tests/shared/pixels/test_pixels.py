"""Pixels over real links: a gateway's holder and a worker's fetcher."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from shared.clock import MonotonicClock
from shared.errors import (
    DependencyUnavailable,
    FrameRefused,
    HearthError,
    InvalidRequest,
    NoResponders,
    Overloaded,
    PayloadTooLarge,
)
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import Done, FetchPixels
from shared.pixels.pixel_fetcher import PixelFetcher, PixelRequest
from shared.pixels.pixel_frames import byte_header
from shared.pixels.pixel_holder import PixelHolder, Regions, StoredImage
from shared.randomness import SystemRandomness
from tests.shared.kv_wire.support import RecordingSink
from tests.support.canaries.memory import data_of
from tests.support.waiting import until

IMAGE_HASH = b"an image of test"
SHAPE = 5, 3, 512, 512
PIXELS = random.Random(0).randbytes(math.prod(SHAPE))
REQUEST = PixelRequest(
    gateway_id="gateway-1",
    tenant_id="tenant-a",
    request_id="request-1",
    image_hash=IMAGE_HASH,
    shape=SHAPE,
)


class OneProcess:
    """The bus and the requests of one process that is gateway and worker."""

    process_id = "gateway-1"

    def __init__(self) -> None:
        self.commands: list[FetchPixels] = []
        self.fails: list[HearthError] = []  # the next requests raise these
        self._handler: Callable[[Any], Any] | None = None

    async def serve(self, subject: str, message_type: type, handler: Callable[[Any], Any]) -> None:
        self._handler = handler

    async def request(self, peer, subject, message, reply_type, *, base_s):
        if self.fails:
            raise self.fails.pop()
        self.commands.append(message)
        assert self._handler is not None
        return await self._handler(message)


class Pair:
    def __init__(self, holder: PixelHolder, fetcher: PixelFetcher, bus: OneProcess) -> None:
        self.holder, self.fetcher, self.bus = holder, fetcher, bus


@pytest.fixture(params=["memory", "tcp", "sealed tcp"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    is_sealed = request.param == "sealed tcp"
    keys = LinkKeys("aead", SystemRandomness()) if is_sealed else None
    server = await KvServer.start(instance_id=b"worker", link_keys=keys)
    if request.param != "memory":
        server._address = msgspec.structs.replace(server.address, unix_path="")
    bus, clock = OneProcess(), MonotonicClock()

    def check(command: FetchPixels, regions: Regions) -> None:
        if regions is not None:
            raise InvalidRequest(f"worker-1 is not in {sorted(regions)}")

    dialer = Dialer(5.0, security="aead" if is_sealed else "none")
    holder = PixelHolder(bus, dialer, check, max_bytes=2 * len(PIXELS))
    fetcher = PixelFetcher(bus, "worker-1", server, keys, clock, SystemRandomness())
    await holder.start()
    yield Pair(holder, fetcher, bus)
    await holder.close()
    await fetcher.close()


def hold(pair: Pair, **options: Any) -> None:
    given = {"request_id": "request-1", "tenant_id": "tenant-a", "image_hash": IMAGE_HASH}
    given |= {"pixels": bytearray(PIXELS), "shape": SHAPE}
    pair.holder.put(**given | options)


async def test_pixels_arrive_whole(pair: Pair) -> None:
    hold(pair)
    for _ in range(2):
        found = await pair.fetcher.fetch(REQUEST, 10.0)
        assert found == PIXELS
    first, second = pair.bus.commands
    assert first.transfer_id != second.transfer_id


async def test_stored_pixels_are_read_for_each_push(pair: Pair) -> None:
    reads = list[FetchPixels]()

    async def find(command: FetchPixels) -> StoredImage | None:
        async def read() -> bytearray:
            reads.append(command)
            return bytearray(PIXELS)

        regions = frozenset({"eu"}) if command.tenant_id == "tenant-eu" else None
        return StoredImage(regions, read) if command.request_id == "prefix:p" else None

    pair.holder.read_stored(find)
    stored = dataclasses.replace(REQUEST, request_id="prefix:p")
    found = await asyncio.gather(*(pair.fetcher.fetch(stored, 10.0) for _ in range(2)))
    assert found == [PIXELS, PIXELS]
    await until(lambda: not pair.holder.num_bytes)
    for other, reason in (
        (REQUEST, "no such image"),
        (dataclasses.replace(stored, tenant_id="tenant-eu"), "is not in"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            await pair.fetcher.fetch(other, 1.0)
    assert len(reads) == 2


async def test_fetches_beside_each_other(pair: Pair) -> None:
    hold(pair)
    hold(pair, request_id="request-2")
    fetches = [pair.fetcher.fetch(REQUEST, 10.0) for _ in range(4)]
    assert all(each == PIXELS for each in await asyncio.gather(*fetches))
    assert pair.holder.num_bytes == len(PIXELS)  # two requests share it


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant_id": "tenant-b"},
        {"request_id": "request-2"},
        {"image_hash": bytes(16)},
        {"shape": (1, 3, 512, 512)},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_what_is_not_held_for_the_request_is_refused(pair: Pair, changes: dict) -> None:
    hold(pair)
    with pytest.raises(InvalidRequest):
        await pair.fetcher.fetch(dataclasses.replace(REQUEST, **changes), 10.0)


async def test_a_worker_that_may_not_have_them_is_refused(pair: Pair) -> None:
    hold(pair)
    regions = frozenset({"eu"})
    hold(pair, regions=regions)
    with pytest.raises(InvalidRequest, match="not in"):
        await pair.fetcher.fetch(REQUEST, 10.0)


async def test_forgotten_pixels_are_gone_once_no_request_has_them(pair: Pair) -> None:
    hold(pair)
    hold(pair, request_id="request-2")
    pair.holder.forget("request-2")
    pair.holder.forget("request-2")
    await pair.fetcher.fetch(REQUEST, 10.0)
    pair.holder.forget("request-1")
    assert pair.holder.num_bytes == 0
    with pytest.raises(InvalidRequest):
        await pair.fetcher.fetch(REQUEST, 10.0)


async def test_a_lost_request_is_tried_again_until_the_deadline(pair: Pair) -> None:
    hold(pair)
    pair.bus.fails = [NoResponders("none"), NoResponders("none")]
    assert await pair.fetcher.fetch(REQUEST, 10.0) == PIXELS
    pair.bus.fails = [NoResponders("none")] * 9
    with pytest.raises(DependencyUnavailable, match="have not come"):
        await pair.fetcher.fetch(REQUEST, 0.0)


async def test_frames_of_a_fetch_that_has_ended_are_rejected(pair: Pair) -> None:
    hold(pair)
    await pair.fetcher.fetch(REQUEST, 10.0)
    (command,) = pair.bus.commands
    link = await pair.holder._dialer.link(command.target, command.link_key)

    async def fill(slot: memoryview) -> None:
        slot[:] = bytes(len(slot))

    with pytest.raises(FrameRefused, match="not expected"):
        await link.send(byte_header(command.transfer_id, 0, 0, 10), fill)


async def test_a_cancelled_fetch_ends_the_push(pair: Pair) -> None:
    hold(pair)
    fetch = asyncio.create_task(pair.fetcher.fetch(REQUEST, 10.0))
    await until(lambda: bool(pair.bus.commands))
    fetch.cancel()
    await asyncio.gather(fetch, return_exceptions=True)
    await until(lambda: len(pair.holder._pushes) == 0)
    assert await pair.fetcher.fetch(REQUEST, 10.0) == PIXELS


async def test_a_worker_that_hangs_is_not_pushed_to_beyond_the_deadline(pair: Pair) -> None:
    hold(pair)
    await pair.fetcher.fetch(REQUEST, 10.0)
    (command,) = pair.bus.commands
    command = msgspec.structs.replace(command, deadline_s=0.05)
    pair.fetcher._receiver.expect(command.transfer_id, RecordingSink(asyncio.Event()))
    await pair.bus.request("", "", command, Done, base_s=1.0)
    await until(lambda: len(pair.holder._pushes) == 0)


async def test_memory_is_bounded(pair: Pair) -> None:
    hold(pair)
    hold(pair, image_hash=b"another image...")
    with pytest.raises(Overloaded, match="limit"):
        hold(pair, tenant_id="tenant-b", request_id="request-2")
    with pytest.raises(PayloadTooLarge, match="of the request have more than"):
        hold(pair, image_hash=b"the third image.")  # sent again it does not fit either


async def test_pixels_of_a_zero_retention_tenant_are_zeroed(pair: Pair) -> None:
    own = bytearray(PIXELS)
    hold(pair, pixels=own, is_zeroed_at_end=True)
    pair.holder.forget("request-1")
    assert not any(own)


async def test_pushes_leave_no_pixels_in_slots_and_buffers(pair: Pair) -> None:
    """A fetch does not say whether anything of its tenant may be retained."""
    own = bytearray(PIXELS)
    hold(pair, pixels=own)
    found = await pair.fetcher.fetch(REQUEST, 10.0)
    assert found == PIXELS
    await until(lambda: len(pair.holder._pushes) == 0)
    ends = pair.holder._dialer, pair.fetcher._receiver
    pieces = [piece for _, piece in data_of(ends, without=(own, PIXELS, found.obj))]
    starts = range(0, len(PIXELS), 1 << 20)
    assert not any(PIXELS[at : at + 64] in piece for at in starts for piece in pieces)
