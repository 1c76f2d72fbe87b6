"""Compressed frames from a sender to a receiver, over TCP that takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.errors import FrameRefused, LinkLost
from shared.kv_wire import frames
from shared.kv_wire.checked_copy import checksum_of
from shared.kv_wire.compression import LinkCompression
from shared.kv_wire.compression_gate import NUM_NEEDED, NUM_PAIRS, UNCOMPRESSED_EVERY
from shared.kv_wire.frames import Ack, Frame, Hello, Record, Refusal, encode_record, sealed_sum
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import CompressionCounts, FrameHeader, PushLink
from shared.kv_wire.tcp import NUM_SLOTS
from shared.messages import DataPlaneAddress
from tests.shared.kv_wire.support import (
    DEADLINE_S,
    INSTANCE,
    RecordingSink,
    eventually,
    fill_with,
    header,
    payload_of,
)
from tests.shared.kv_wire.test_bad_peers import read_goodbye, read_record
from tests.shared.kv_wire.throttled import CODEC, SpentClock, ThrottledPair, throttled_pair

FRAME_BYTES = 200_001
MANY = NUM_NEEDED + NUM_PAIRS + 1 + UNCOMPRESSED_EVERY  # so that the next frame goes compressed
NUM_CODED = (NUM_PAIRS + 1) // 2 + UNCOMPRESSED_EVERY - 1  # of so many on a slow link


def kv_of(num_bytes: int, seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).standard_normal(num_bytes // 2 + 1).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()[:num_bytes]


async def push(
    pair: ThrottledPair,
    *,
    num_frames: int = MANY,
    address: DataPlaneAddress | None = None,
    payload: Callable[[int, int], bytes] = kv_of,
) -> None:
    """One frame after the other, each of which must arrive as it was."""
    sink = RecordingSink()
    pair.server.expect(b"placement-a", sink)
    link = await pair.dialer.link(address or pair.address)
    async with asyncio.timeout(DEADLINE_S):
        for number in range(num_frames):
            data = payload(FRAME_BYTES, number)
            await link.send(header(len(data), sequence_number=number), fill_with(data))
            assert sink.frames.pop()[1] == data
    pair.server.forget(b"placement-a")


async def test_a_slow_link_goes_over_to_compressed_frames() -> None:
    async with throttled_pair(50e6) as pair:
        await push(pair)
        counts = pair.dialer.compressed
        assert counts.num_frames == pair.codec.num_decoded == NUM_CODED
        assert counts.num_saved_bytes > 0.25 * NUM_CODED * FRAME_BYTES
        sent = MANY * FRAME_BYTES - counts.num_saved_bytes
        assert sent < pair.throttle.num_bytes < sent + MANY * 500 + 500


async def test_compressed_frames_take_less_time() -> None:
    spent = []
    for sender_has_codec in (False, True):
        async with throttled_pair(50e6, sender_has_codec=sender_has_codec) as pair:
            await push(pair, num_frames=200)
            spent.append(pair.clock.time_s)
    assert spent[1] < 0.8 * spent[0]


@pytest.mark.parametrize(
    ("bandwidth", "encode", "max_coded"),
    [(5e9, 5e9, 0), (1.2e9, 5e9, 0), (125e6, 0.2e9, 6), (800e6, 5e9, 16)],
    ids=["fast", "ten gigabits", "slow codec", "between"],
)
async def test_where_it_does_not_pay_it_stays_off(
    bandwidth: float, encode: float, max_coded: int
) -> None:
    async with throttled_pair(bandwidth, encode=encode) as pair:
        await push(pair, num_frames=100)
        assert pair.codec.num_encoded <= max_coded


async def test_a_link_that_becomes_fast_goes_back() -> None:
    async with throttled_pair(50e6) as pair:
        await push(pair)
        pair.throttle.bandwidth = 10e9
        await push(pair)
        num_before = pair.codec.num_encoded
        await push(pair)
        assert pair.codec.num_encoded == num_before > 0


@pytest.mark.parametrize("num_at_once", [1, 3])
async def test_a_receiver_that_takes_its_time_does_not_make_the_link_slow(num_at_once: int) -> None:
    """Of several frames under way the next may come while it is busy, and is noticed late: that
    looks like a slow wire, until frames of fewer bytes have come no sooner.
    """

    class SlowSink(RecordingSink):
        async def frame(self, header: FrameHeader, payload: memoryview) -> None:
            pair.clock.time_s += 0.05
            await super().frame(header, payload)

    async with throttled_pair(5e9) as pair:
        sink = SlowSink()
        pair.server.expect(b"placement-a", sink)
        link = await pair.dialer.link(pair.address)
        for _ in range(60 // num_at_once):
            sends = (
                link.send(header(FRAME_BYTES), fill_with(kv_of(FRAME_BYTES)))
                for _ in range(num_at_once)
            )
            await asyncio.gather(*sends)
        assert len(sink.frames) == 60
        assert link._compression is not None
        assert not link._compression.gate.is_on
        if num_at_once == 1:
            assert pair.codec.num_encoded == 0


@pytest.mark.parametrize("is_first_refused", [False, True])
def test_what_a_refused_frame_took_is_not_the_next_ones_time(is_first_refused: bool) -> None:
    """Two at a time over 1.2 GB/s, on which nothing is tried."""
    clock, data = SpentClock(), memoryview(bytearray(FRAME_BYTES))
    compression = LinkCompression(CODEC, clock, CompressionCounts(), round_trip_s=0.0)
    for _ in range(20):
        sent = [compression.sent(data, None) for _ in range(2)]
        for frame_id, each in enumerate(sent):
            clock.time_s += FRAME_BYTES / 1.2e9
            is_refused = is_first_refused and frame_id == 0
            compression.answered(each, Refusal(frame_id, "no") if is_refused else Ack(frame_id))
    assert not any(compression.gate.takes(FRAME_BYTES) for _ in range(4))


async def test_what_does_not_shrink_goes_as_it_is() -> None:
    async with throttled_pair(10e6) as pair:
        await push(pair, payload=payload_of)
        assert 0 < pair.codec.num_encoded <= MANY // 2
        assert pair.dialer.compressed.num_frames == pair.codec.num_decoded == 0


async def test_through_shared_memory_it_is_off_however_slow() -> None:
    async with throttled_pair(10e6) as pair:
        address = msgspec.structs.replace(pair.server.address, port=1)
        assert (await pair.dialer.link(address))._compression is None
        await push(pair, address=address)
        assert pair.codec.num_encoded == 0


@pytest.mark.parametrize("lacks", ["sender", "receiver", "same codec"])
async def test_peers_that_do_not_share_a_codec_send_plain_frames(lacks: str) -> None:
    class OtherCodec:
        name = "another"
        encode, decode = CODEC.encode, CODEC.decode

    theirs: Any = {"receiver": None, "same codec": OtherCodec()}.get(lacks, "same")
    has_codec = lacks != "sender"
    async with throttled_pair(10e6, sender_has_codec=has_codec, receiver_codec=theirs) as pair:
        await push(pair)
        assert pair.codec.num_encoded == pair.codec.num_decoded == 0


async def test_a_compressed_frame_damaged_on_the_way_is_found_and_counted() -> None:
    async with throttled_pair(10e6) as pair:
        await push(pair)
        sink = RecordingSink()
        pair.server.expect(b"placement-a", sink)
        link: PushLink = await pair.dialer.link(pair.address)
        pair.codec.spoil = True
        with pytest.raises(FrameRefused, match="checksum"):
            await link.send(header(FRAME_BYTES, sequence_number=7), fill_with(kv_of(FRAME_BYTES)))
        pair.codec.spoil = False
        assert [each.sequence_number for each in sink.corrupted] == [7]
        assert pair.server.counts.num_corrupt == 1
        await link.send(header(FRAME_BYTES), fill_with(kv_of(FRAME_BYTES)))
        assert [data for _, data in sink.frames] == [kv_of(FRAME_BYTES)]


async def test_a_receiver_that_dies_meanwhile_fails_the_send() -> None:
    async with throttled_pair(10e6) as pair:
        await push(pair)
        pair.server.expect(b"placement-a", RecordingSink(asyncio.Event()))
        link = await pair.dialer.link(pair.address)
        send = asyncio.ensure_future(link.send(header(FRAME_BYTES), fill_with(kv_of(FRAME_BYTES))))
        await eventually(lambda: pair.codec.num_encoded == NUM_CODED + 1)
        await pair.server.close()
        with pytest.raises(LinkLost):
            async with asyncio.timeout(DEADLINE_S):
                await send


# ── threads ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_cancelled_send_leaves_when_its_thread_has_let_go_of_the_slot() -> None:
    async with throttled_pair(10e6) as pair:
        await push(pair)
        sink = RecordingSink()
        pair.server.expect(b"placement-a", sink)
        link = await pair.dialer.link(pair.address)
        pair.codec.go.clear()
        send = asyncio.ensure_future(link.send(header(FRAME_BYTES), fill_with(kv_of(FRAME_BYTES))))
        await eventually(lambda: pair.codec.num_encoded == NUM_CODED + 1)
        send.cancel()
        other = kv_of(FRAME_BYTES, seed=1)
        following = asyncio.ensure_future(link.send(header(FRAME_BYTES), fill_with(other)))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not send.done()
        pair.codec.go.set()
        async with asyncio.timeout(DEADLINE_S):
            await following
        assert send.cancelled()
        assert [data for _, data in sink.frames] == [other]
        assert link.num_unacked == 0


@pytest.mark.parametrize("dies", ["receiver", "link"])
async def test_a_link_that_ends_while_a_thread_encodes_fails_the_send(dies: str) -> None:
    async with throttled_pair(10e6) as pair:
        await push(pair)
        link = await pair.dialer.link(pair.address)
        pair.codec.go.clear()
        send = asyncio.ensure_future(link.send(header(FRAME_BYTES), fill_with(kv_of(FRAME_BYTES))))
        await eventually(lambda: pair.codec.num_encoded == NUM_CODED + 1)
        await (pair.server.close() if dies == "receiver" else link.close())
        await eventually(lambda: link.is_lost)
        pair.codec.go.set()
        with pytest.raises(LinkLost):
            async with asyncio.timeout(DEADLINE_S):
                await send


async def test_a_receiver_closes_when_its_thread_has_let_go_of_the_frame() -> None:
    async with throttled_pair(10e6) as pair:
        await push(pair)
        sink = RecordingSink()
        pair.server.expect(b"placement-a", sink)
        link = await pair.dialer.link(pair.address)
        num_before = pair.codec.num_decoded
        send = asyncio.ensure_future(link.send(header(FRAME_BYTES), fill_with(kv_of(FRAME_BYTES))))
        await eventually(lambda: link.num_unacked == 1)  # encoded
        pair.codec.go.clear()
        await eventually(lambda: pair.codec.num_decoded == num_before + 1)
        closing = asyncio.ensure_future(pair.server.close())
        with pytest.raises(LinkLost):
            await send
        assert not closing.done()
        pair.codec.go.set()
        async with asyncio.timeout(DEADLINE_S):
            await closing
        assert not sink.frames


async def test_several_frames_under_way_do_not_meet_in_the_receivers_memory() -> None:
    """The sink holds the first while the others arrive."""
    async with throttled_pair(10e6) as pair:
        await push(pair)
        sink = RecordingSink(asyncio.Event())
        assert sink.gate is not None
        pair.server.expect(b"placement-a", sink)
        link = await pair.dialer.link(pair.address)
        sent = [kv_of(FRAME_BYTES, seed=number) for number in range(UNCOMPRESSED_EVERY - 1)]
        sends = [
            asyncio.ensure_future(link.send(header(FRAME_BYTES), fill_with(data))) for data in sent
        ]
        await eventually(lambda: link.num_unacked == NUM_SLOTS)
        async with asyncio.timeout(DEADLINE_S):
            await sink.entered.wait()
            sink.gate.set()
            await asyncio.gather(*sends)
        assert [data for _, data in sink.frames] == sent
        assert pair.codec.num_decoded >= NUM_CODED + NUM_SLOTS


# ── hostile senders ──────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def bare_sender() -> AsyncIterator[
    tuple[KvServer, RecordingSink, asyncio.StreamReader, asyncio.StreamWriter]
]:
    """Has said its hello to a receiver that can decode."""
    server, sink = await KvServer.start(instance_id=INSTANCE, codec=CODEC), RecordingSink()
    server.expect(b"placement-a", sink)
    reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
    writer.write(encode_record(Hello(INSTANCE)))
    welcome = await read_record(reader)
    assert isinstance(welcome, frames.Welcome)
    assert welcome.codecs == (CODEC.name,)
    yield server, sink, reader, writer
    writer.close()
    await server.close()


def coded_frame(**changed: Any) -> tuple[Frame, bytes]:
    data = kv_of(FRAME_BYTES)
    out = memoryview(bytearray(FRAME_BYTES))
    coded = bytes(out[: CODEC.encode(memoryview(bytearray(data)), out)])
    made = header(FRAME_BYTES)
    made = msgspec.structs.replace(made, checksum=sealed_sum(made, checksum_of(memoryview(data))))
    frame = Frame(0, made, codec=CODEC.name, coded_bytes=len(coded))
    return msgspec.structs.replace(frame, **changed), coded


def noise(coded: bytes) -> bytes:
    return payload_of(len(coded))


@pytest.mark.parametrize(
    ("changed", "spoil"),
    [
        ({"coded_bytes": 1}, lambda coded: coded[:1]),
        ({"coded_bytes": 5000}, lambda coded: coded[:5000]),
        ({"coded_bytes": FRAME_BYTES - 1}, lambda coded: coded.ljust(FRAME_BYTES - 1, b"\0")),
        ({}, noise),
        ({}, lambda coded: bytes(len(coded))),
        ({}, lambda coded: b"\xff" * len(coded)),
    ],
)
async def test_what_cannot_be_decoded_is_refused_as_corrupt(
    changed: dict[str, Any], spoil: Callable[[bytes], bytes]
) -> None:
    async with bare_sender() as (server, sink, reader, writer):
        for frame_id in (0, 2):  # what the first leaves in memory must not pass for the second's
            frame, coded = coded_frame(frame_id=frame_id)
            writer.write(encode_record(frame) + coded)
            ack: Record = await read_record(reader)
            assert isinstance(ack, Ack)
            assert ack.held_s >= ack.decode_s > 0
            assert sink.frames.pop()[1] == kv_of(FRAME_BYTES)
            if frame_id == 0:
                frame, coded = coded_frame(frame_id=1, **changed)
                writer.write(encode_record(frame) + spoil(coded))
                assert isinstance(await read_record(reader), Refusal)
                assert (server.counts.num_corrupt, len(sink.corrupted)) == (1, 1)
        assert not sink.frames


@pytest.mark.parametrize("codec", ["zip", "x" * 60_000])
async def test_a_codec_that_nobody_offered_ends_the_connection(codec: str) -> None:
    async with bare_sender() as (server, _, reader, writer):
        writer.write(encode_record(coded_frame(codec=codec)[0]))
        assert "was not offered" in await read_goodbye(reader)
        await eventually(lambda: server.counts.num_bad_peers == 1)


@pytest.mark.parametrize("coded_bytes", [0, -1, FRAME_BYTES, 1 << 40])
async def test_a_code_that_is_no_shorter_ends_the_connection(coded_bytes: int) -> None:
    async with bare_sender() as (server, _, reader, writer):
        writer.write(encode_record(coded_frame(coded_bytes=coded_bytes)[0]))
        assert "is not smaller" in await read_goodbye(reader)
        await eventually(lambda: server.counts.num_bad_peers == 1)
