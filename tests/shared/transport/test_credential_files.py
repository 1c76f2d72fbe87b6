"""A process goes on over NATS with files that are replaced while it runs, on real servers."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.local.credentials import named_credentials, nats_config_with_nkeys, tls_block
from shared.errors import ConfigError
from shared.nats_urls import nats_servers
from shared.tls import TlsFiles
from shared.transport.bus import NatsBus
from shared.transport.credential_files import CredentialFiles
from shared.transport.nkeys import UserKey
from shared.transport.server_config import NatsUser, nats_server_config
from tests.support.certificates import Authority
from tests.support.servers import Server, find_binary, free_port
from tests.support.waiting import until

NAMES = ["gateway=gateway-1", "scheduler=scheduler-1"]


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started = list[Server]()
    yield started
    for each in started:
        each.stop()


def has_returned(bus: NatsBus, num_losses: int) -> bool:
    return bus._events.num_losses > num_losses and bus.is_connected


async def test_new_seed_is_used_without_a_restart(tmp_path: Path, servers: list[Server]) -> None:
    seeds, config, port = tmp_path / "keys", tmp_path / "nats.conf", free_port()

    def write_config() -> None:
        named = named_credentials(NAMES)
        config.write_text(nats_config_with_nkeys(named, seeds, host="127.0.0.1", port=port))

    write_config()
    server = Server([find_binary("nats-server"), "-c", str(config)], port)
    servers.append(server)
    url = f"nats://{{}}@127.0.0.1:{port}?seed={seeds}/{{}}.nk"
    rotated, other = [
        await NatsBus.connect(url.format(name, name), process_id=name)
        for name in ("gateway-1", "scheduler-1")
    ]
    before = UserKey.of_file(seeds / "gateway-1.nk")
    (seeds / "gateway-1.nk").unlink()
    write_config()
    assert UserKey.of_file(seeds / "gateway-1.nk").public != before.public
    os.kill(server.pid, signal.SIGHUP)
    await until(lambda: has_returned(rotated, 0))
    await rotated.flush()
    assert (other._events.num_losses, other.is_connected) == (0, True)
    for bus in (rotated, other):
        await bus.close()


async def test_new_password_is_used_without_a_restart(
    tmp_path: Path, servers: list[Server]
) -> None:
    url_file, config, port = tmp_path / "url", tmp_path / "nats.conf", free_port()

    def write(password: str) -> str:
        users = [NatsUser("gateway", "gateway-1", password), NatsUser("decode", "decode-1", "word")]
        config.write_text(nats_server_config(users, host="127.0.0.1", port=port))
        return f"nats://gateway-1:{password}@127.0.0.1:{port}"

    url = write("old")
    url_file.write_text(url)
    server = Server([find_binary("nats-server"), "-c", str(config)], port)
    servers.append(server)
    buses = [
        await NatsBus.connect(url, process_id="gateway-1", to_clients=to_clients, url_file=url_file)
        for to_clients in (False, True)
    ]
    other = await NatsBus.connect(f"nats://decode-1:word@127.0.0.1:{port}", process_id="decode-1")

    async def rotate(password: str, num_losses: int) -> None:
        url_file.write_text(write(password))
        os.kill(server.pid, signal.SIGHUP)
        await until(lambda: all(has_returned(each, num_losses) for each in buses))
        for each in buses:
            await each.flush()

    await rotate("new", 0)
    await rotate("newer", 1)
    assert (other._events.num_losses, other.is_connected) == (0, True)
    for each in (*buses, other):
        await each.close()


def test_url_of_another_credential_is_not_used(tmp_path: Path) -> None:
    file, url = tmp_path / "url", "nats://a:old@127.0.0.1:4222"
    file.write_text(url)
    files = CredentialFiles(nats_servers(url), None, url_file=file)
    assert files.read().password == "old"
    file.write_text("nats://b:new@127.0.0.1:4222")
    with pytest.raises(ConfigError, match="is not of a"):
        files.read_changed()
    file.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        files.read_changed()
    file.write_text("nats://a:new@127.0.0.1:4222")
    found = files.read_changed()
    assert found is not None and found.password == "new"


async def test_certificates_of_another_authority_are_used_without_a_restart(
    tmp_path: Path, servers: list[Server]
) -> None:
    folder, port = tmp_path / "tls", free_port()
    first = Authority(folder)
    first.issue("server")
    tls = first.issue("decode-1")
    config = tmp_path / "nats.conf"
    users = [NatsUser("decode", "decode-1", "word")]
    text = nats_server_config(users, host="127.0.0.1", port=port)
    config.write_text(text + tls_block(str(folder)))
    server = Server([find_binary("nats-server"), "-c", str(config)], port)
    servers.append(server)
    url = f"tls://decode-1:word@localhost:{port}"
    bus = await NatsBus.connect(url, process_id="decode-1", tls=tls)
    server.stop()
    second = Authority(tmp_path / "second")
    for name in ("server", "decode-1"):
        second.issue(name)
    for file in second.folder.iterdir():
        shutil.copy(file, folder / file.name)
    server.start()
    await until(lambda: has_returned(bus, 0))
    await bus.flush()
    await bus.close()


def test_files_are_read_when_they_have_changed(tmp_path: Path) -> None:
    seed = tmp_path / "a.nk"
    seed.write_text(UserKey.create().seed)
    servers = nats_servers(f"nats://a@127.0.0.1:4222?seed={seed}")
    files = CredentialFiles(servers, None)
    first = files.read()
    assert files.read_changed() is None
    seed.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        files.read_changed()
    assert files.read_changed() is None  # said once
    seed.write_text(UserKey.create().seed)
    second = files.read_changed()
    assert first.key is not None and second is not None and second.key is not None
    assert first.key.public != second.key.public


async def test_half_replaced_files_do_not_end_the_connection(
    tmp_path: Path, servers: list[Server]
) -> None:
    seeds, port = tmp_path / "keys", free_port()
    text = nats_config_with_nkeys(named_credentials(NAMES), seeds, host="127.0.0.1", port=port)
    (tmp_path / "nats.conf").write_text(text)
    server = Server([find_binary("nats-server"), "-c", str(tmp_path / "nats.conf")], port)
    servers.append(server)
    url = f"nats://gateway-1@127.0.0.1:{port}?seed={seeds}/gateway-1.nk"
    bus = await NatsBus.connect(url, process_id="gateway-1", tls=TlsFiles())
    (seeds / "gateway-1.nk").write_text("half a se")
    with capture_logs() as logs:
        server.stop()
        server.start()
        await until(lambda: has_returned(bus, 0))
    assert [each["event"] for each in logs].count("nats_files_unreadable") == 1
    await bus.close()
