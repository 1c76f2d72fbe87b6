"""Compressed frames from a sender to a receiver, over TCP with a given bandwidth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
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
from shared.messages import DataPlaneAddress, LinkSecurity
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
from tests.shared.kv_wire.throttled import CODEC, SimulatedClock, ThrottledPair, throttled_pair

FRAME_BYTES = 200_001
# After NUM_FRAMES, NUM_CODED of them compressed, a slow link compresses the next frame too.
NUM_FRAMES = NUM_NEEDED + NUM_PAIRS + 1 + UNCOMPRESSED_EVERY
NUM_CODED = (NUM_PAIRS + 1) // 2 + UNCOMPRESSED_EVERY - 1


@cache
def random_kv() -> bytes:
    values = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def kv_of(num_bytes: int, seed: int = 0) -> bytes:
    """Other numbers for each of a thousand seeds."""
    return random_kv()[1000 * seed :][:num_bytes]


async def push(
    pair: ThrottledPair,
    *,
    num_frames: int = NUM_FRAMES,
    address: DataPlaneAddress | None = None,
    payload: Callable[[int, int], bytes] = kv_of,
) -> None:
    """Sends frames one after the other. Asserts that each arrives unchanged."""
    sink = RecordingSink()
    pair.server.expect(b"placement-a", sink)
    link = await pair.dialer.link(address or pair.address, pair.link_key)
    async with asyncio.timeout(DEADLINE_S):
        for number in range(num_frames):
            data = payload(FRAME_BYTES, number)
            await link.send(header(len(data), sequence_number=number), fill_with(data))
            assert sink.frames.pop()[1] == data
    pair.server.forget(b"placement-a")


@pytest.mark.parametrize("security", [None, "mac", "aead"])
async def test_slow_link_switches_to_compression(security: LinkSecurity | None) -> None:
    async with throttled_pair(50e6, security=security) as pair:
        await push(pair)
        counts = pair.dialer.compressed
        assert counts.num_frames == pair.codec.num_decoded == NUM_CODED
        assert counts.num_saved_bytes > 0.25 * NUM_CODED * FRAME_BYTES
        sent = NUM_FRAMES * FRAME_BYTES - counts.num_saved_bytes
        assert sent < pair.throttle.num_bytes < sent + NUM_FRAMES * 500 + 500


async def test_compression_is_faster_on_slow_link() -> None:
    seconds = []
    for sender_has_codec in (False, True):
        async with throttled_pair(50e6, sender_has_codec=sender_has_codec) as pair:
            await push(pair, num_frames=100)
            seconds.append(pair.clock.time_s)
    assert seconds[1] < 0.8 * seconds[0]


@pytest.mark.parametrize(
    ("bandwidth", "encode", "max_coded"),
    [(5e9, 5e9, 0), (1.2e9, 5e9, 0), (125e6, 0.2e9, 6), (800e6, 5e9, 16)],
    ids=["fast", "ten gigabits", "slow codec", "between"],
)
async def test_compression_stays_off_without_benefit(
    bandwidth: float, encode: float, max_coded: int
) -> None:
    async with throttled_pair(bandwidth, encode=encode) as pair:
        await push(pair, num_frames=100)
        assert pair.codec.num_encoded <= max_coded


async def test_compression_stops_when_link_becomes_fast() -> None:
    async with throttled_pair(50e6) as pair:
        await push(pair)
        pair.throttle.bandwidth = 10e9
        await push(pair)
        num_before = pair.codec.num_encoded
        await push(pair)
        assert pair.codec.num_encoded == num_before > 0


@pytest.mark.parametrize("num_at_once", [1, 3])
async def test_slow_receiver_does_not_count_as_slow_link(num_at_once: int) -> None:
    """With several frames in flight, the next may arrive while the receiver is busy, and is read
    late. That looks like a slow wire, until compressed frames arrive no earlier.
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


@pytest.mark.parametrize("is_first_rejected", [False, True])
def test_rejected_frame_adds_no_wire_time_to_the_next(is_first_rejected: bool) -> None:
    """Two frames in flight over 1.2 GB/s, which is too fast for a trial of compression."""
    clock, data = SimulatedClock(), memoryview(bytearray(FRAME_BYTES))
    compression = LinkCompression(CODEC, clock, CompressionCounts(), round_trip_s=0.0)
    for _ in range(20):
        sent = [compression.sent(data, None) for _ in range(2)]
        for frame_id, each in enumerate(sent):
            clock.time_s += FRAME_BYTES / 1.2e9
            is_rejected = is_first_rejected and frame_id == 0
            compression.answered(each, Refusal(frame_id, "no") if is_rejected else Ack(frame_id))
    assert not any(compression.gate.takes(FRAME_BYTES) for _ in range(4))


async def test_incompressible_payload_is_sent_uncompressed() -> None:
    async with throttled_pair(10e6) as pair:
        await push(pair, payload=payload_of)
        assert 0 < pair.codec.num_encoded <= NUM_FRAMES // 2
        assert pair.dialer.compressed.num_frames == pair.codec.num_decoded == 0


async def test_shared_memory_link_never_compresses() -> None:
    async with throttled_pair(10e6) as pair:
        address = msgspec.structs.replace(pair.server.address, port=1)
        assert (await pair.dialer.link(address))._compression is None
        await push(pair, address=address)
        assert pair.codec.num_encoded == 0


@pytest.mark.parametrize("missing", ["sender", "receiver", "same codec"])
async def test_peers_without_common_codec_do_not_compress(missing: str) -> None:
    class OtherCodec:
        name = "another"
        encode, decode = CODEC.encode, CODEC.decode

    codec_of_receiver: Any = {"receiver": None, "same codec": OtherCodec()}.get(missing, "same")
    has_codec = missing != "sender"
    async with throttled_pair(
        10e6, sender_has_codec=has_codec, receiver_codec=codec_of_receiver
    ) as pair:
        await push(pair)
        assert pair.codec.num_encoded == pair.codec.num_decoded == 0


async def test_corrupt_compressed_frame_is_rejected_and_counted() -> None:
    async with throttled_pair(10e6) as pair:
        await push(pair)
        sink = RecordingSink()
        pair.server.expect(b"placement-a", sink)
        link: PushLink = await pair.dialer.link(pair.address)
        pair.codec.corrupt = True
        with pytest.raises(FrameRefused, match="checksum"):
            await link.send(header(FRAME_BYTES, sequence_number=7), fill_with(kv_of(FRAME_BYTES)))
        pair.codec.corrupt = False
        assert [each.sequence_number for each in sink.corrupted] == [7]
        assert pair.server.counts.num_corrupt == 1
        await link.send(header(FRAME_BYTES), fill_with(kv_of(FRAME_BYTES)))
        assert [data for _, data in sink.frames] == [kv_of(FRAME_BYTES)]


async def test_closed_receiver_fails_the_send() -> None:
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


async def test_cancelled_send_waits_for_its_encoder_thread() -> None:
    async with throttled_pair(10e6) as pair:
        await push(pair)
        sink = RecordingSink()
        pair.server.expect(b"placement-a", sink)
        link = await pair.dialer.link(pair.address)
        pair.codec.may_run.clear()
        send = asyncio.ensure_future(link.send(header(FRAME_BYTES), fill_with(kv_of(FRAME_BYTES))))
        await eventually(lambda: pair.codec.num_encoded == NUM_CODED + 1)
        send.cancel()
        other = kv_of(FRAME_BYTES, seed=1)
        following = asyncio.ensure_future(link.send(header(FRAME_BYTES), fill_with(other)))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not send.done()
        pair.codec.may_run.set()
        async with asyncio.timeout(DEADLINE_S):
            await following
        assert send.cancelled()
        assert [data for _, data in sink.frames] == [other]
        assert link.num_unacked == 0


@pytest.mark.parametrize("closed_end", ["receiver", "link"])
async def test_link_closed_during_encoding_fails_the_send(closed_end: str) -> None:
    async with throttled_pair(10e6) as pair:
        await push(pair)
        link = await pair.dialer.link(pair.address)
        pair.codec.may_run.clear()
        send = asyncio.ensure_future(link.send(header(FRAME_BYTES), fill_with(kv_of(FRAME_BYTES))))
        await eventually(lambda: pair.codec.num_encoded == NUM_CODED + 1)
        await (pair.server.close() if closed_end == "receiver" else link.close())
        await eventually(lambda: link.is_lost)
        pair.codec.may_run.set()
        with pytest.raises(LinkLost):
            async with asyncio.timeout(DEADLINE_S):
                await send


async def test_receiver_close_waits_for_its_decoder_thread() -> None:
    async with throttled_pair(10e6) as pair:
        await push(pair)
        sink = RecordingSink()
        pair.server.expect(b"placement-a", sink)
        link = await pair.dialer.link(pair.address)
        num_before = pair.codec.num_decoded
        send = asyncio.ensure_future(link.send(header(FRAME_BYTES), fill_with(kv_of(FRAME_BYTES))))
        await eventually(lambda: link.num_unacked == 1)  # encoded
        pair.codec.may_run.clear()
        await eventually(lambda: pair.codec.num_decoded == num_before + 1)
        closing = asyncio.ensure_future(pair.server.close())
        with pytest.raises(LinkLost):
            await send
        assert not closing.done()
        pair.codec.may_run.set()
        async with asyncio.timeout(DEADLINE_S):
            await closing
        assert not sink.frames


async def test_frames_in_flight_do_not_share_receiver_memory() -> None:
    """The sink delays the first frame while the others arrive."""
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
async def raw_sender() -> AsyncIterator[
    tuple[KvServer, RecordingSink, asyncio.StreamReader, asyncio.StreamWriter]
]:
    """A connection, after the handshake, to a receiver with a codec."""
    server, sink = await KvServer.start(instance_id=INSTANCE, codec=CODEC), RecordingSink()
    server.expect(b"placement-a", sink)
    reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
    try:
        writer.write(encode_record(Hello(INSTANCE)))
        welcome = await read_record(reader)
        assert isinstance(welcome, frames.Welcome)
        assert welcome.codecs == (CODEC.name,)
        yield server, sink, reader, writer
    finally:
        writer.close()
        await server.close()


def coded_frame(**changed: Any) -> tuple[Frame, bytes]:
    data = kv_of(FRAME_BYTES)
    out = memoryview(bytearray(FRAME_BYTES))
    coded = bytes(out[: CODEC.encode(memoryview(bytearray(data)), out)])
    frame_header = header(FRAME_BYTES)
    frame_header = msgspec.structs.replace(
        frame_header, checksum=sealed_sum(frame_header, checksum_of(memoryview(data)))
    )
    frame = Frame(0, frame_header, codec=CODEC.name, coded_bytes=len(coded))
    return msgspec.structs.replace(frame, **changed), coded


def noise(coded: bytes) -> bytes:
    return payload_of(len(coded))


@pytest.mark.parametrize(
    ("changed", "corrupt"),
    [
        ({"coded_bytes": 1}, lambda coded: coded[:1]),
        ({"coded_bytes": 5000}, lambda coded: coded[:5000]),
        ({"coded_bytes": FRAME_BYTES - 1}, lambda coded: coded.ljust(FRAME_BYTES - 1, b"\0")),
        ({}, noise),
        ({}, lambda coded: bytes(len(coded))),
        ({}, lambda coded: b"\xff" * len(coded)),
    ],
)
async def test_undecodable_frame_is_rejected_as_corrupt(
    changed: dict[str, Any], corrupt: Callable[[bytes], bytes]
) -> None:
    async with raw_sender() as (server, sink, reader, writer):
        for frame_id in (0, 2):  # the decoder must not use data that frame 0 left in memory
            frame, coded = coded_frame(frame_id=frame_id)
            writer.write(encode_record(frame) + coded)
            ack: Record = await read_record(reader)
            assert isinstance(ack, Ack)
            assert ack.held_s >= ack.decode_s > 0
            assert sink.frames.pop()[1] == kv_of(FRAME_BYTES)
            if frame_id == 0:
                frame, coded = coded_frame(frame_id=1, **changed)
                writer.write(encode_record(frame) + corrupt(coded))
                assert isinstance(await read_record(reader), Refusal)
                assert (server.counts.num_corrupt, len(sink.corrupted)) == (1, 1)
        assert not sink.frames


@pytest.mark.parametrize("codec", ["zip", "x" * 60_000])
async def test_unoffered_codec_ends_connection(codec: str) -> None:
    async with raw_sender() as (server, _, reader, writer):
        writer.write(encode_record(coded_frame(codec=codec)[0]))
        assert "was not offered" in await read_goodbye(reader)
        await eventually(lambda: server.counts.num_bad_peers == 1)


@pytest.mark.parametrize("coded_bytes", [0, -1, FRAME_BYTES, 1 << 40])
async def test_encoding_not_smaller_than_payload_ends_connection(coded_bytes: int) -> None:
    async with raw_sender() as (server, _, reader, writer):
        writer.write(encode_record(coded_frame(coded_bytes=coded_bytes)[0]))
        assert "is not smaller" in await read_goodbye(reader)
        await eventually(lambda: server.counts.num_bad_peers == 1)
