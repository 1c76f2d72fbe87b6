"""HTTPS: which certificate serves, and that a client that does not read is disconnected."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from services.gateway.http.certificate import Certificate
from services.gateway.http.connection import connection_of
from services.gateway.http.server import WebServer
from shared.errors import ConfigError
from shared.tls import TlsFiles
from tests.services.gateway.http.test_server import app
from tests.support.certificates import Authority
from tests.support.waiting import LIMIT_S

PART_BYTES = 1 << 20


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


def install(source: TlsFiles, folder: Path, *parts: str) -> TlsFiles:
    """Replaces files of the server, by default both."""
    target = TlsFiles(ca=source.ca, cert=str(folder / "http.crt"), key=str(folder / "http.key"))
    for part in parts or ("cert", "key"):
        path = getattr(target, part)
        changed_at = os.stat(path).st_mtime_ns + 1 if Path(path).exists() else 1  # noqa: PTH116
        shutil.copyfile(getattr(source, part), path)
        os.utime(path, ns=(changed_at, changed_at))
    return target


@asynccontextmanager
async def https(certificate: Certificate, **options: Any) -> AsyncIterator[WebServer]:
    server = WebServer(options.pop("app", app), "127.0.0.1", 0, certificate=certificate, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def name_served(server: WebServer, ca: str) -> str:
    """The common name in the certificate of a new connection; its host is verified."""
    context = TlsFiles(ca=ca).context()
    host, port = server.address
    _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname="localhost")
    found = x509.load_der_x509_certificate(
        writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    )
    writer.close()
    (name,) = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(name.value)


async def test_https_serves_and_plain_http_does_not(authority: Authority, tmp_path: Path) -> None:
    files = install(authority.issue("http"), tmp_path)
    async with https(Certificate(files.cert, files.key)) as server:
        url = f"://localhost:{server.address[1]}/"
        context = TlsFiles(ca=authority.ca).context()
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            assert (await client.get(f"https{url}")).status_code == 200
            with pytest.raises(httpx.HTTPError):
                await client.get(f"http{url}")


async def test_changed_files_are_loaded_as_a_pair(authority: Authority, tmp_path: Path) -> None:
    """A certificate without its key, which is replaced later, is not served."""
    files = install(authority.issue("first"), tmp_path)
    certificate = Certificate(files.cert, files.key)
    first_end = certificate.expires_at
    second = authority.issue("second", days=2)
    async with https(certificate) as server:
        certificate.poll()
        assert await name_served(server, authority.ca) == "first"
        install(second, tmp_path, "cert")
        certificate.poll()
        assert await name_served(server, authority.ca) == "first"
        install(second, tmp_path, "key")
        assert server.certificate_expires_at == certificate.expires_at == first_end
        certificate.poll()
        assert await name_served(server, authority.ca) == "second"
        assert certificate.expires_at - first_end > 80_000  # seconds: a day


@pytest.mark.parametrize("fault", ["no certificate", "another key", "missing key"])
def test_unusable_files_are_named(authority: Authority, tmp_path: Path, fault: str) -> None:
    files = install(authority.issue("http"), tmp_path)
    match fault:
        case "no certificate":
            Path(files.cert).write_text("no certificate")
        case "another key":
            install(authority.issue("other"), tmp_path, "key")
        case "missing key":
            Path(files.key).unlink()
    with pytest.raises(ConfigError, match=f"cannot use http_cert {files.cert} with http_key"):
        Certificate(files.cert, files.key)


async def test_client_that_does_not_read_is_disconnected(
    authority: Authority, tmp_path: Path
) -> None:
    ended = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not connection_of(scope).is_lost:
            part = bytes(PART_BYTES)
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        ended.set()

    num_slow: list[None] = []
    files = install(authority.issue("http"), tmp_path)
    certificate = Certificate(files.cert, files.key)
    options = {"app": endless, "write_timeout_s": 0.2}
    async with (
        asyncio.timeout(LIMIT_S),
        https(certificate, on_slow_client=lambda: num_slow.append(None), **options) as server,
    ):
        context = TlsFiles(ca=authority.ca).context()
        reader, writer = await asyncio.open_connection(
            *server.address, ssl=context, server_hostname="localhost"
        )
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await ended.wait()
        assert len(num_slow) == 1
        with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
            await reader.readexactly(1 << 30)
        writer.close()
