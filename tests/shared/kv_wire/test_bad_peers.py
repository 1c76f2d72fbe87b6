"""Faulty and hostile peers: garbage, false lengths and slots, wrong instance ids."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from shared.errors import LinkLost
from shared.kv_wire.checked_copy import checksum_of
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.expected_pushes import ReceiverCounts
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
    decode_prefix,
    decode_record,
    encode_record,
    sealed_sum,
)
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import FrameHeader
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import DataPlaneAddress
from shared.randomness import SystemRandomness
from tests.shared.kv_wire.support import (
    DEADLINE_S,
    INSTANCE,
    RecordingSink,
    eventually,
    fill_with,
    header,
    open_files,
)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
FRAME = Frame(0, header(1000))


@pytest.fixture(params=["unix", "tcp"])
async def raw(request: pytest.FixtureRequest, server: KvServer) -> AsyncIterator[Streams]:
    """A connection to the server before the handshake."""
    if request.param == "unix":
        reader, writer = await asyncio.open_unix_connection(server.address.unix_path)
    else:
        reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
    yield reader, writer
    writer.close()


def zeros_header(num_bytes: int) -> FrameHeader:
    unsealed = header(num_bytes)
    checksum = sealed_sum(unsealed, checksum_of(memoryview(bytes(num_bytes))))
    return msgspec.structs.replace(unsealed, checksum=checksum)


async def read_record(reader: asyncio.StreamReader) -> Record:
    async with asyncio.timeout(DEADLINE_S):
        body_bytes = decode_prefix(await reader.readexactly(PREFIX.size))
        return decode_record(await reader.readexactly(body_bytes))


async def read_goodbye(reader: asyncio.StreamReader) -> str:
    record = await read_record(reader)
    assert isinstance(record, Goodbye)
    assert await reader.read() == b""
    return record.reason


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a KV data plane peer"),
        (os.urandom(4096), "not a KV data plane peer"),
        (PREFIX.pack(MAGIC, 9, 10), "version 9"),
        (PREFIX.pack(MAGIC, VERSION, 1 << 31), "a record of 2147483648 bytes"),
        (PREFIX.pack(MAGIC, VERSION, 5) + b"\xc1" * 5, "unreadable record"),
        (encode_record(Ack(1)), "received Ack, expected Hello"),
        (encode_record(Hello(b"someone else")), "does not listen here"),
    ],
)
async def test_invalid_hello_gets_reason_and_ends_connection(
    raw: Streams, server: KvServer, sent: bytes, reason: str
) -> None:
    reader, writer = raw
    writer.write(sent)
    try:
        assert reason in await read_goodbye(reader)
    except ConnectionResetError:
        assert len(sent) > PREFIX.size  # unread bytes turn the close into a reset
    await eventually(lambda: server.counts.num_bad_peers == 1)
    assert server.num_connections == 0


async def test_close_during_hello_counts_as_bad_peer(raw: Streams, server: KvServer) -> None:
    _, writer = raw
    writer.write(encode_record(Hello(INSTANCE))[:-1])
    writer.close()
    await eventually(lambda: server.counts.num_bad_peers == 1)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"x" * PREFIX.size, "not a KV data plane peer"),
        (PREFIX.pack(MAGIC, VERSION, 65537), "a record of 65537 bytes"),
        (encode_record(Hello(INSTANCE)), "does not send Hello"),
        (encode_record(Refusal(0, "no")), "does not send Refusal"),
        (encode_record(Frame(0, header(MAX_FRAME_BYTES + 1), 0)), None),
        (encode_record(Frame(0, header(0), 0)), None),
    ],
)
async def test_invalid_record_after_hello_ends_connection(
    raw: Streams, server: KvServer, sent: bytes, reason: str | None
) -> None:
    reader, writer = raw
    writer.write(encode_record(Hello(INSTANCE)))
    assert isinstance(await read_record(reader), Welcome)
    writer.write(sent)
    found = await read_goodbye(reader)
    assert reason is None or reason in found
    await eventually(lambda: server.num_connections == 0)
    assert server.counts.num_bad_peers == 1


async def test_truncated_frame_is_dropped_and_sink_notified(server: KvServer) -> None:
    sink = RecordingSink()
    server.expect(b"placement-a", sink)
    reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
    writer.write(encode_record(Hello(INSTANCE)))
    await read_record(reader)
    writer.write(encode_record(FRAME) + bytes(999))
    writer.close()
    async with asyncio.timeout(DEADLINE_S):
        await sink.lost.wait()
    assert (sink.frames, sink.corrupted, sink.num_lost) == ([], [], 1)
    assert server.counts.num_bad_peers == 1


async def test_wrong_checksum_is_rejected(server: KvServer) -> None:
    sink = RecordingSink()
    server.expect(b"placement-a", sink)
    reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
    writer.write(encode_record(Hello(INSTANCE)))
    await read_record(reader)
    writer.write(encode_record(FRAME) + bytes(1000))
    refusal = await read_record(reader)
    assert isinstance(refusal, Refusal)
    assert "checksum" in refusal.reason
    assert len(sink.corrupted) == server.counts.num_corrupt == 1
    writer.close()


async def test_too_many_frames_in_flight_end_connection(server: KvServer) -> None:
    sink = RecordingSink(gate=asyncio.Event())
    server.expect(b"placement-a", sink)
    reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
    writer.write(encode_record(Hello(INSTANCE)))
    await read_record(reader)
    for frame_id in range(5):
        writer.write(encode_record(Frame(frame_id, zeros_header(1000))) + bytes(1000))
    record = await read_record(reader)
    writer.close()
    assert isinstance(record, Goodbye)
    assert "more than 4 frames" in record.reason
    assert sink.num_lost == 1


@pytest.mark.parametrize("slots", [(4,), (-1,), (1 << 40,), (None,), (0, 0)])
async def test_invalid_slots_end_connection(
    server: KvServer, slots: tuple[int | None, ...]
) -> None:
    server.expect(b"placement-a", RecordingSink(gate=asyncio.Event()))
    reader, writer = await asyncio.open_unix_connection(server.address.unix_path)
    writer.write(encode_record(Hello(INSTANCE)))
    await read_record(reader)
    writer.write(b"".join(encode_record(Frame(i, zeros_header(1), s)) for i, s in enumerate(slots)))
    record = await read_record(reader)
    assert isinstance(record, Goodbye)
    assert "slot" in record.reason or "does not send Frame here" in record.reason
    writer.close()


# ── faulty receivers ─────────────────────────────────────────────────────────────────────────────

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(path: Path, handler: Handler) -> AsyncIterator[DataPlaneAddress]:
    """Serves one handler on a unix socket and on TCP."""
    async with (
        await asyncio.start_unix_server(handler, path),
        await asyncio.start_server(handler, "127.0.0.1", 0) as listener,
    ):
        yield DataPlaneAddress(
            host="127.0.0.1",
            port=listener.sockets[0].getsockname()[1],
            unix_path=str(path),
            instance_id=INSTANCE,
        )


def sending(data: bytes) -> Handler:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(data)
        writer.close()

    return handler


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "not a KV data plane peer"),
        (b"", "closed the connection during the handshake"),
        (encode_record(Welcome(INSTANCE, 4, MAX_FRAME_BYTES))[:-3], "during the handshake"),
        (encode_record(Welcome(b"another", 4, MAX_FRAME_BYTES)), "another instance"),
        (encode_record(Welcome(INSTANCE, 10**9, MAX_FRAME_BYTES)), "unsupported: "),
        (encode_record(Welcome(INSTANCE, 4, 17)), "unsupported: "),
        (encode_record(Goodbye("full")), "rejected the connection: full"),
        (encode_record(Ack(0)), "received Ack, expected Welcome"),
    ],
)
async def test_dialer_rejects_invalid_welcome(
    tmp_path: Path, dialer: Dialer, data: bytes, message: str
) -> None:
    async with listening(tmp_path / "s", sending(data)) as address:
        with pytest.raises(LinkLost, match=message):
            await dialer.link(address)


async def test_server_rejects_hello_to_another_instance(server: KvServer, dialer: Dialer) -> None:
    target = msgspec.structs.replace(server.address, instance_id=b"gone by now")
    before = open_files()
    with pytest.raises(LinkLost, match="does not listen here"):
        await dialer.link(target)
    await eventually(lambda: server.counts.num_bad_peers == 2)
    assert open_files() == before


@pytest.mark.parametrize("is_first", [True, False])
async def test_receiver_that_claims_the_instance_of_another_gets_none_of_its_frames(
    server: KvServer, dialer: Dialer, is_first: bool
) -> None:
    """Whoever has been sent the other's address knows its instance."""
    impostor = await KvServer.start(instance_id=INSTANCE)
    order = (impostor, server) if is_first else (server, impostor)
    links = {each: await dialer.link(each.address) for each in order}
    sink = RecordingSink()
    server.expect(b"placement-a", sink)
    await links[server].send(header(3), fill_with(b"abc"))
    assert len(sink.frames) == 1 and impostor.counts == ReceiverCounts()
    await impostor.close()


async def test_link_of_another_key_is_not_shared(dialer: Dialer) -> None:
    """The receiver knows the end of a link by its key, and takes KV for the key's owner alone."""
    keys = LinkKeys("aead", SystemRandomness())
    server = await KvServer.start(instance_id=INSTANCE, link_keys=keys)
    address = msgspec.structs.replace(server.address, unix_path="")
    first = await dialer.link(address, keys.key_for("prefill-1"))
    unknown = LinkKeys("aead", SystemRandomness()).key_for("prefill-1")
    with pytest.raises(LinkLost, match="unknown"):
        await dialer.link(address, unknown)
    assert await dialer.link(address, keys.key_for("prefill-1")) is first
    keys.forget("prefill-1")
    async with asyncio.timeout(DEADLINE_S):
        second = await dialer.link(address, keys.key_for("prefill-1"))
        assert second is not first and first.is_lost
        await eventually(lambda: server.num_connections == 1)
        await server.close()


async def test_dial_of_silent_receiver_ends_at_timeout(tmp_path: Path) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with listening(tmp_path / "s", hang) as address:
        with pytest.raises(LinkLost, match=r"did not answer within 0\.05 s"):
            await Dialer(connect_timeout_s=0.05).link(address)


@pytest.mark.parametrize("kind", ["a pipe", "too small", "not sealed"])
async def test_memory_that_could_fault_is_not_mapped(
    tmp_path: Path, kind: str, server: KvServer, dialer: Dialer
) -> None:
    def memory() -> int:
        if kind == "a pipe":
            read_fd, write_fd = os.pipe()
            os.close(write_fd)
            return read_fd
        fd = os.memfd_create("trap", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096 if kind == "too small" else 4 * MAX_FRAME_BYTES)
        return fd

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.setblocking(False)
        target = msgspec.structs.replace(server.address, unix_path=str(tmp_path / "s"))
        dial = asyncio.ensure_future(dialer.link(target))
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        with sock:
            fd = memory()
            welcome = Welcome(INSTANCE, 4, MAX_FRAME_BYTES)
            socket.send_fds(sock, [encode_record(welcome)], [fd])
            os.close(fd)
            link = await dial
    server.expect(b"placement-a", RecordingSink())
    await link.send(header(3), fill_with(b"abc"))  # over TCP
    assert not [name for name in open_files() if "trap" in name]


async def test_ack_of_unsent_frame_ends_link(tmp_path: Path, dialer: Dialer) -> None:
    data = encode_record(Welcome(INSTANCE, 4, MAX_FRAME_BYTES)) + encode_record(Ack(77))

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(data)
        await reader.read()
        writer.close()

    async with listening(tmp_path / "s", handler) as address:
        try:
            link = await dialer.link(msgspec.structs.replace(address, unix_path=""))
        except LinkLost:
            return
        await eventually(lambda: link.is_lost)
        with pytest.raises(LinkLost, match="frame 77"):
            await link.send(header(3), fill_with(b"abc"))


def test_prefix_is_twelve_bytes() -> None:
    assert struct.calcsize(PREFIX.format) == PREFIX.size == 12
