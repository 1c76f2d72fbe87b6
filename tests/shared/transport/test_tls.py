"""tls:// and rediss://: no credential leaves before the server's certificate is verified."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import astuple

from services.local.credentials import tls_block
from shared.clock import MonotonicClock
from shared.errors import ConfigError, DependencyUnavailable
from shared.store import RedisStore, StoreUnavailable
from shared.tls import TlsFiles, certificate_ends_at
from shared.transport.bus import NatsBus
from shared.transport.server_config import NatsUser, nats_server_config
from tests.support.certificates import Authority, server_context
from tests.support.recording_relay import relay_to
from tests.support.servers import NatsServer, RedisServer, Server, find_binary, free_port
from tests.support.waiting import LIMIT_S

SECRET = "the-password-of-decode-1"
CONNECT_S, REFUSED_S = LIMIT_S, 0.4
NO_ANSWER = "no answer"


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


async def refusal(port: int, tls: TlsFiles) -> str:
    """Why a client does not connect. Its time, all of which it takes, may end on a busy machine
    before the server has answered.
    """
    reason = NO_ANSWER
    for factor in (1, 10, 100):
        with pytest.raises(DependencyUnavailable) as raised:
            await connect(port, tls, timeout_s=factor * REFUSED_S)
        reason = raised.value.message
        if not reason.endswith(NO_ANSWER):
            break
    return reason


@pytest.mark.parametrize("tls_first", [False, True])
async def test_mutual_tls_connects_and_hides_the_credential(
    tls_server: Server, authority: Authority, tls_first: bool
) -> None:
    async with relay_to(tls_server.port) as (relay, port):
        bus = await connect(port, authority.issue("decode-1"), tls_first=tls_first)
        assert bus.is_connected
        ends_at = certificate_ends_at(str(authority.folder / "server.crt"))
        assert bus.server_certificate_ends_at == ends_at
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
        async with relay_to(server.port) as (relay, port):
            if is_stripped:
                relay.to_sender = strip
            reason = await refusal(port, authority.issue("decode-1"))
            assert "does not offer TLS" in reason and SECRET not in reason
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
    async with tls_ended(server) as (received, port):
        with pytest.raises(DependencyUnavailable):
            await connect(port, client, tls_first=True, timeout_s=REFUSED_S)
        assert not received


@asynccontextmanager
async def tls_ended(server: TlsFiles) -> AsyncIterator[tuple[bytearray, int]]:
    """A server that requires TLS and certificates: what clients sent after the handshake."""
    received = bytearray()

    async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                received.extend(data)
        except OSError:
            pass
        writer.close()

    listener = await asyncio.start_server(read_all, "localhost", 0, ssl=server_context(server))
    try:
        yield received, listener.sockets[0].getsockname()[1]
    finally:
        listener.close()


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    missing = TlsFiles(ca=str(tmp_path / "no.crt"), cert="also-missing")
    problems = list(missing.problems("nats"))
    assert [each.split()[0] for each in problems] == ["nats_ca", "nats_cert", "nats_cert"]
    (tmp_path / "ca.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match="cannot read the files for TLS"):
        TlsFiles(ca=str(tmp_path / "ca.crt")).context()


# ── Redis ────────────────────────────────────────────────────────────────────────────────────────


def store_of(port: int, tls: TlsFiles) -> RedisStore:
    return RedisStore(f"rediss://localhost:{port}/0", MonotonicClock(), timeout_s=LIMIT_S, tls=tls)


async def test_redis_with_mutual_tls(redis_server: RedisServer, authority: Authority) -> None:
    tls = server_context(authority.issue("server"))
    async with relay_to(redis_server.port, tls=tls) as (_, port):
        store = store_of(port, authority.issue("gateway-1"))
        assert await store.get("hearth:nothing") is None
        await store.close()


async def test_redis_is_connected_to_again_with_the_files_of_now(
    redis_server: RedisServer, authority: Authority, tmp_path: Path
) -> None:
    before, now = authority.issue("gateway-1"), Authority(tmp_path / "new").issue("gateway-1")
    named = TlsFiles(
        ca=str(tmp_path / "ca"), cert=str(tmp_path / "cert"), key=str(tmp_path / "key")
    )
    copy_files(before, named)
    tls = server_context(before)
    async with relay_to(redis_server.port, tls=tls) as (_, port):
        store = store_of(port, named)
        assert await store.get("hearth:nothing") is None
        tls.load_cert_chain(now.cert, now.key)
        tls.load_verify_locations(now.ca)
        copy_files(now, named)
        await store._redis.connection_pool.disconnect()  # as a restart of Redis does
        assert await store.get("hearth:nothing") is None
        await store.close()


def copy_files(source: TlsFiles, target: TlsFiles) -> None:
    for each, path in zip(astuple(source), astuple(target), strict=True):
        shutil.copy(each, path)


@pytest.mark.parametrize("has_authority", [True, False])
async def test_authorities_of_the_system_sign_for_redis_only_without_a_named_one(
    redis_server: RedisServer,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_authority: bool,
) -> None:
    public = Authority(tmp_path / "public")
    monkeypatch.setenv("SSL_CERT_FILE", public.ca)
    client = public.issue("gateway-1")
    client = msgspec.structs.replace(client, ca=authority.ca if has_authority else "")
    async with relay_to(redis_server.port, tls=server_context(public.issue("server"))) as (_, port):
        store = store_of(port, client)
        if has_authority:
            with pytest.raises(StoreUnavailable):
                await store.get("hearth:nothing")
        else:
            assert await store.get("hearth:nothing") is None
        await store.close()


@pytest.mark.parametrize("fault", FAULTS)
async def test_unverified_redis_is_refused(
    redis_server: RedisServer, authority: Authority, tmp_path: Path, fault: str
) -> None:
    client, server = faulty_files(fault, "gateway-1", authority, tmp_path)
    async with relay_to(redis_server.port, tls=server_context(server)) as (_, port):
        store = store_of(port, client)
        with pytest.raises(StoreUnavailable):
            await store.get("hearth:nothing")
        await store.close()
