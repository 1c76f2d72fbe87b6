"""Hostile senders on the KV data plane, over TCP and over a unix socket with its memfd.

Invalid frames are never delivered, are counted, and leave nothing; a good frame after them arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import random
import socket
from typing import Any

import msgspec
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.kv.kv_codec import BLOCK_BYTES, Bf16FrameCodec
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.frames import (
    MAGIC,
    MAX_FRAME_BYTES,
    PREFIX,
    VERSION,
    Ack,
    Frame,
    Goodbye,
    Hello,
    Record,
    Refusal,
    Welcome,
    encode_record,
    sealed_sum,
)
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import FrameHeader
from tests.fuzz.mutations import anything, spoiled, torn
from tests.fuzz.profile import fuzz
from tests.guarded import guarded
from tests.shared.kv_wire.support import (
    INSTANCE,
    RecordingSink,
    descriptors,
    eventually,
    fill_with,
    header,
)
from tests.support.waiting import LIMIT_S

PLACEMENT_ID, OTHER_ID = b"placement-a", b"placement-b"
PAYLOADS = tuple(random.Random(seed).randbytes(size) for seed, size in enumerate((1, 1000, 5000)))
SLOT_BYTES = MAX_FRAME_BYTES
CODEC = Bf16FrameCodec()
SHRINKING = bytes(random.Random(9).choice((0x3F, 0x40, 0xBF)) for _ in range(3 * BLOCK_BYTES + 5))


def checksum_of(made: FrameHeader, payload: bytes) -> int:
    return sealed_sum(made, xxhash.xxh3_64_intdigest(payload))


def sealed(payload: bytes, **changed: Any) -> FrameHeader:
    made = header(len(payload), placement_id=PLACEMENT_ID)
    made = msgspec.structs.replace(made, **changed)
    return msgspec.structs.replace(made, checksum=checksum_of(made, payload))


def frames(slot_index: int | None) -> list[tuple[Record, bytes]]:
    """Good frames; `slot_index` is None if the payload follows."""
    return [
        (Frame(number, sealed(payload, sequence_number=number), slot_index), payload)
        for number, payload in enumerate(PAYLOADS)
    ]


def coded_of(payload: bytes) -> bytes:
    out = memoryview(bytearray(len(payload)))
    return bytes(out[: CODEC.encode(memoryview(bytearray(payload)), out)])


CODED = coded_of(SHRINKING)


def coded_frames() -> list[tuple[Record, bytes]]:
    made = sealed(SHRINKING, sequence_number=9)
    return [(Frame(9, made, codec=CODEC.name, coded_bytes=len(CODED)), CODED)]


def recorded(tree: Any) -> bytes:
    """A record with this body, of any length or content."""
    body = msgspec.msgpack.encode(tree)
    return PREFIX.pack(MAGIC, VERSION, len(body)) + body


OTHERS: tuple[Record, ...] = (
    *(Ack(0), Refusal(0, "no"), Goodbye("bye"), Hello(INSTANCE)),
    Welcome(INSTANCE, 4, SLOT_BYTES),
)


@st.composite
def hostile_bytes(draw: st.DrawFn, slot_index: int | None) -> bytes:
    """A sequence of records, each good or spoiled, with their payloads or others."""
    sent = b""
    for _ in range(draw(st.integers(1, 5))):
        others = [*coded_frames(), *((each, b"") for each in OTHERS)]
        good, payload = draw(st.sampled_from([*frames(slot_index), *others]))
        encoded = encode_record(good)
        tree = msgspec.msgpack.decode(encoded[PREFIX.size :])
        sent += draw(
            st.just(encoded)
            | spoiled([tree]).map(recorded)
            | spoiled([tree]).map(recorded)
            | torn([encoded])
            | anything
        )
        if slot_index is None:
            sent += draw(st.just(payload) | torn([payload]) | st.sampled_from((*PAYLOADS, CODED)))
    return sent


def is_genuine(frame: FrameHeader, payload: bytes) -> bool:
    return frame.checksum == checksum_of(frame, payload)


class HostileSender:
    """A bare connection that has sent its hello."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.memory: mmap.mmap | None = None

    @classmethod
    async def dial(cls, server: KvServer, *, is_unix: bool) -> HostileSender:
        loop = asyncio.get_running_loop()
        address = server.address
        family = socket.AF_UNIX if is_unix else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        where: Any = address.unix_path if is_unix else (address.host, address.port)
        await loop.sock_connect(sock, where)
        await loop.sock_sendall(sock, encode_record(Hello(INSTANCE)))
        made = cls(sock)
        if is_unix:
            await asyncio.sleep(0)
            sock.setblocking(True)
            _, fds, _, _ = await asyncio.to_thread(socket.recv_fds, sock, 4096, 1)
            sock.setblocking(False)
            made.memory = mmap.mmap(fds[0], 4 * SLOT_BYTES)
            socket.close(fds[0])
        else:
            await loop.sock_recv(sock, 4096)
        return made

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the receiver has closed it
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def cancel(self) -> None:
        """Shuts down writing, then reads until the other side has ended."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(self.sock, 65_536):
                pass
        self.sock.close()
        if self.memory is not None:
            self.memory.close()


async def play(data: bytes, cuts: list[int], *, is_unix: bool) -> None:
    broken: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
    server = await KvServer.start(instance_id=INSTANCE, codec=CODEC)
    sinks = {each: RecordingSink() for each in (PLACEMENT_ID, OTHER_ID)}
    for placement_id, sink in sinks.items():
        server.expect(placement_id, sink)
    before = len(descriptors())
    sender = await HostileSender.dial(server, is_unix=is_unix)
    if sender.memory is not None:
        sender.memory[: len(PAYLOADS[2])] = PAYLOADS[2]
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        await sender.send(data[start:end])
        await asyncio.sleep(0)
    await sender.cancel()
    await eventually(lambda: server.num_connections == 0)
    num_served = sum(len(sink.frames) for sink in sinks.values())
    assert server.counts.num_frames == num_served
    for sink in sinks.values():
        assert all(is_genuine(*each) for each in sink.frames)
    await _check_next_frame(server, is_unix=is_unix)
    for placement_id in sinks:
        server.forget(placement_id)
        await server.idle(placement_id)
    assert not server._placements._expected
    assert not server._placements._num_copying
    await eventually(lambda: len(descriptors()) <= before)
    await server.close()
    assert not broken, broken


async def _check_next_frame(server: KvServer, *, is_unix: bool) -> None:
    sink, dialer = RecordingSink(), Dialer(connect_timeout_s=LIMIT_S)
    server.expect(b"placement-c", sink)
    changed: dict[str, Any] = {"port": 1} if is_unix else {"unix_path": ""}
    link = await dialer.link(msgspec.structs.replace(server.address, **changed))
    await link.send(header(3, placement_id=b"placement-c"), fill_with(b"abc"))
    assert [payload for _, payload in sink.frames] == [b"abc"]
    await dialer.close()
    server.forget(b"placement-c")
    await eventually(lambda: server.num_connections == 0)


@st.composite
def cut_bytes(draw: st.DrawFn, slot_index: int | None) -> tuple[bytes, list[int]]:
    data = draw(hostile_bytes(slot_index))
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=4))
    return data, sorted(cuts)


@fuzz(60)
@given(cut_bytes(None))
def test_receiver_survives_any_bytes_over_tcp(sent: tuple[bytes, list[int]]) -> None:
    asyncio.run(play(*sent, is_unix=False))


@fuzz(60)
@given(cut_bytes(0))
def test_receiver_survives_any_bytes_over_a_unix_socket(sent: tuple[bytes, list[int]]) -> None:
    asyncio.run(play(*sent, is_unix=True))


@st.composite
def codes(draw: st.DrawFn) -> bytes:
    """Good encoded data, torn or partly overwritten; or any bytes."""
    data = bytearray(draw(torn([CODED]) | st.just(CODED)))
    for _ in range(draw(st.integers(0, 3))):
        at, size = draw(st.integers(0, len(data))), draw(st.integers(1, 3000))
        data[at : at + size] = draw(st.sampled_from((b"\0", b"\x80", b"\xff"))) * len(
            data[at : at + size]
        )
    return draw(st.just(bytes(data)) | st.binary(max_size=len(CODED)))


@fuzz(120)
@given(codes(), st.integers(-3, 3) | st.integers(-len(SHRINKING), 3 * BLOCK_BYTES), st.booleans())
def test_codec_survives_any_bytes(coded: bytes, num_extra: int, is_at_end: bool) -> None:
    """It writes no byte outside its buffers, and valid data decodes to one payload."""
    found = []
    for _ in range(2):
        buffer = guarded(len(SHRINKING) + num_extra, is_at_end=is_at_end)
        is_decoded = CODEC.decode(guarded(coded, is_at_end=is_at_end).data, buffer.data)
        found.append(buffer.tobytes() if is_decoded else None)
    assert found[0] == found[1]


@fuzz(80)
@given(
    st.lists(
        st.tuples(st.sampled_from((*PAYLOADS[1:], SHRINKING)), st.integers(0, 5000)), max_size=6
    ),
    st.booleans(),
)
def test_codec_decodes_what_it_encoded(parts: list[tuple[bytes, int]], is_at_end: bool) -> None:
    payload = b"".join(part[:size] for part, size in parts)
    buffer = guarded(len(payload), is_at_end=is_at_end)
    num_bytes = CODEC.encode(guarded(payload, is_at_end=is_at_end).data, buffer.data)
    if num_bytes:
        decoded = guarded(len(payload), is_at_end=is_at_end)
        assert CODEC.decode(
            guarded(buffer[:num_bytes].tobytes(), is_at_end=is_at_end).data, decoded.data
        )
        assert decoded.tobytes() == payload
