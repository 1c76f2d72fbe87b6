"""tls:// and rediss://: no credential leaves before the server's certificate is verified."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.local.credentials import tls_block
from shared.clock import MonotonicClock
from shared.errors import ConfigError, DependencyUnavailable
from shared.messages import DataPlaneAddress
from shared.store import RedisStore, StoreUnavailable
from shared.subjects import NatsUser, nats_server_config
from shared.tls import TlsFiles
from shared.transport.bus import NatsBus
from tests.certificates import Authority
from tests.servers import NatsServer, RedisServer, Server, find_binary, free_port
from tests.shared.kv_wire.sealing.recording_relay import RecordingRelay, recording_relay

SECRET = "the-password-of-decode-1"
CONNECT_S, REFUSED_S = 10.0, 0.4


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("tls") / "authority")
    made.issue("server")
    return made


@pytest.fixture(scope="module")
def tls_server(authority: Authority) -> Iterator[Server]:
    """A nats-server with the TLS block of `hearth nats-config --tls`."""
    port = free_port()
    users = [NatsUser("decode", "decode-1", SECRET)]
    config = nats_server_config(users, host="127.0.0.1", port=port)
    path = authority.folder / "nats.conf"
    path.write_text(config + tls_block(str(authority.folder)))
    server = Server([find_binary("nats-server"), "-c", str(path)], port)
    yield server
    server.stop()


@asynccontextmanager
async def recorded(port: int) -> AsyncIterator[tuple[RecordingRelay, int]]:
    address = DataPlaneAddress(host="127.0.0.1", port=port, unix_path="", instance_id=b"i")
    async with recording_relay(address) as (relay, found):
        yield relay, found.port


async def connect(
    port: int, tls: TlsFiles, *, tls_first: bool = False, timeout_s: float = CONNECT_S
) -> NatsBus:
    return await NatsBus.connect(
        f"tls://decode-1:{SECRET}@localhost:{port}",
        process_id="decode-1",
        timeout_s=timeout_s,
        tls=tls,
        tls_first=tls_first,
    )


@pytest.mark.parametrize("tls_first", [False, True])
async def test_mutual_tls_connects_and_hides_the_credential(
    tls_server: Server, authority: Authority, tls_first: bool
) -> None:
    async with recorded(tls_server.port) as (relay, port):
        bus = await connect(port, authority.issue("decode-1"), tls_first=tls_first)
        assert bus.is_connected
        await bus.close()
        assert b"CONNECT" not in relay.recorded
        assert SECRET.encode() not in relay.recorded
        assert (b"INFO" not in relay.recorded) is tls_first


async def test_downgrade_to_plain_text_gets_no_byte_of_the_credential(
    nats_server: NatsServer, tls_server: Server, authority: Authority
) -> None:
    """The path removes the server's request for TLS, or leads to a server without TLS."""

    def strip(data: bytes) -> bytes:
        return re.sub(rb'"tls_(required|verify|available)":true,?', b"", data)

    for server, is_stripped in ((nats_server, False), (tls_server, True)):
        async with recorded(server.port) as (relay, port):
            if is_stripped:
                relay.to_sender = strip
            with pytest.raises(DependencyUnavailable, match="does not offer TLS") as raised:
                await connect(port, authority.issue("decode-1"), timeout_s=REFUSED_S)
            assert SECRET not in raised.value.message
            assert b"INFO" in relay.recorded
            assert b"CONNECT" not in relay.recorded
            assert SECRET.encode() not in relay.recorded


FAULTS = ["wrong authority", "expired", "wrong name", "no certificate"]


def faulty_files(
    fault: str, client_name: str, authority: Authority, folder: Path
) -> tuple[TlsFiles, TlsFiles]:
    """The files of a client and of a server, one of which the other end must refuse."""
    client, server = authority.issue(client_name), authority.issue("server")
    match fault:
        case "wrong authority":
            client = Authority(folder / "another").issue(client_name)
        case "expired":
            server = authority.issue("late", days=-1)
        case "wrong name":
            server = authority.issue("elsewhere", host="elsewhere.example")
        case "no certificate":
            client = TlsFiles(ca=authority.ca)
    return client, server


@pytest.mark.parametrize("fault", FAULTS)
async def test_unverified_server_or_client_is_refused(
    authority: Authority, tls_server: Server, tmp_path: Path, fault: str
) -> None:
    client, server = faulty_files(fault, "decode-1", authority, tmp_path)
    async with tls_ended(server, authority) as (received, port):
        with pytest.raises(DependencyUnavailable):
            await connect(port, client, tls_first=True, timeout_s=REFUSED_S)
        assert not received


@asynccontextmanager
async def tls_server_on_free_port(
    accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    server: TlsFiles,
    authority: Authority,
) -> AsyncIterator[int]:
    """The port of a server that requires a certificate of its clients."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.load_cert_chain(server.cert, server.key)
    context.verify_mode = ssl.CERT_REQUIRED
    listener = await asyncio.start_server(accept, "localhost", 0, ssl=context)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()


@asynccontextmanager
async def tls_ended(server: TlsFiles, authority: Authority) -> AsyncIterator[tuple[bytearray, int]]:
    """What clients sent after the handshake, and the port."""
    received = bytearray()

    async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                received.extend(data)
        except OSError:
            pass
        writer.close()

    async with tls_server_on_free_port(read_all, server, authority) as port:
        yield received, port


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    missing = TlsFiles(ca=str(tmp_path / "no.crt"), cert="also-missing")
    problems = list(missing.problems("nats"))
    assert [each.split()[0] for each in problems] == ["nats_ca", "nats_cert", "nats_cert"]
    (tmp_path / "ca.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match="cannot read the files for TLS"):
        TlsFiles(ca=str(tmp_path / "ca.crt")).context()


# ── Redis ────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def redis_behind_tls(
    redis_server: RedisServer, server: TlsFiles, authority: Authority
) -> AsyncIterator[int]:
    """The port of a TLS proxy in front of Redis."""
    relay = RecordingRelay("127.0.0.1", redis_server.port)
    async with tls_server_on_free_port(relay.accept, server, authority) as port:
        yield port


def store_of(port: int, tls: TlsFiles) -> RedisStore:
    return RedisStore(f"rediss://localhost:{port}/0", MonotonicClock(), timeout_s=2.0, tls=tls)


async def test_redis_with_mutual_tls(redis_server: RedisServer, authority: Authority) -> None:
    async with redis_behind_tls(redis_server, authority.issue("server"), authority) as port:
        store = store_of(port, authority.issue("gateway-1"))
        assert await store.get("hearth:nothing") is None
        await store.close()


@pytest.mark.parametrize("fault", FAULTS)
async def test_unverified_redis_is_refused(
    redis_server: RedisServer, authority: Authority, tmp_path: Path, fault: str
) -> None:
    client, server = faulty_files(fault, "gateway-1", authority, tmp_path)
    async with redis_behind_tls(redis_server, server, authority) as port:
        store = store_of(port, client)
        with pytest.raises(StoreUnavailable):
            await store.get("hearth:nothing")
        await store.close()
