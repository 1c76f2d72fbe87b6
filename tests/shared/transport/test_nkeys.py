"""Login with keys, on a real nats-server that knows public keys alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.local.credentials import named_credentials, nats_config_with_nkeys
from shared.config import GatewayConfig
from shared.errors import ConfigError, DependencyUnavailable
from shared.lifecycle.identity import connect_to_clients
from shared.nats_urls import nats_servers, user_of, without_password
from shared.subjects import API_REQUESTS, SUBMIT
from shared.transport.bus import NatsBus
from shared.transport.nkeys import UserKey
from tests.support.servers import Server, find_binary, free_port

NAMES = ["gateway=gateway-1", "scheduler=scheduler-1@eu", "client=client-1"]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "seeds"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, seeds: Path) -> Iterator[Server]:
    port = free_port()
    text = nats_config_with_nkeys(named_credentials(NAMES), seeds, host="127.0.0.1", port=port)
    again = nats_config_with_nkeys(named_credentials(NAMES), seeds, host="127.0.0.1", port=port)
    assert text == again, "seeds that are there are kept"
    path = tmp_path_factory.mktemp("nats") / "nats.conf"
    path.write_text(text)
    server = Server([find_binary("nats-server"), "-c", str(path)], port)
    yield server
    server.stop()


def url_of(server: Server, seeds: Path, name: str, seed: str = "") -> str:
    return f"nats://{name}@127.0.0.1:{server.port}?seed={seeds / f'{seed or name}.nk'}"


async def test_process_logs_in_with_its_seed(server: Server, seeds: Path) -> None:
    url = url_of(server, seeds, "scheduler-1")
    assert user_of(url) == "scheduler-1"
    assert "?" not in without_password(url)
    bus = await NatsBus.connect(url, process_id="scheduler-1")
    await bus.subscribe(SUBMIT, bytes, lambda _: None)
    await bus.flush()
    await bus.close()


async def test_gateway_logs_in_among_clients_with_the_same_seed(
    server: Server, seeds: Path
) -> None:
    url = url_of(server, seeds, "gateway-1")
    config = GatewayConfig(nats_url=url, process_id="gateway-1", redis_url="redis://none")
    bus = await connect_to_clients(config)
    client = await NatsBus.connect(url_of(server, seeds, "client-1"), process_id="client-1")
    received: list[bytes] = []

    async def take(subject: str, reply: str, data: bytes, headers: bytes) -> None:
        received.append(data)

    await bus.untyped.listen(API_REQUESTS, take)
    await bus.flush()
    await client.untyped.send("hearth.v1.api.chat.client-1", b"{}", reply="_INBOX.client-1.a")
    await client.flush()
    await bus.flush()
    assert received == [b"{}"]
    await client.close()
    await bus.close()


async def test_other_keys_are_rejected(server: Server, seeds: Path, tmp_path: Path) -> None:
    (tmp_path / "other.nk").write_text(UserKey.create().seed)
    with pytest.raises(DependencyUnavailable, match="cannot reach NATS"):
        await NatsBus.connect(url_of(server, tmp_path, "other"), process_id="other", timeout_s=2)


def test_server_knows_no_secret(server: Server, seeds: Path) -> None:
    text = nats_config_with_nkeys(named_credentials(NAMES), seeds, host="h", port=1)
    files = sorted(seeds.iterdir())
    assert [each.name for each in files] == ["client-1.nk", "gateway-1.nk", "scheduler-1.nk"]
    for each in files:
        assert each.stat().st_mode & 0o777 == 0o600
        assert each.read_text().startswith("SU") and each.read_text().strip() not in text
        assert f"nkey: {UserKey.of_file(each).public}, permissions" in text
    assert text.count("nkey: U") == 4 and "password" not in text


@pytest.mark.parametrize("text", ["", "SUxx", "password", "SU" + "A" * 56])
def test_file_without_a_seed_is_named_without_its_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "seed.nk"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"seed\.nk: it is no seed") as caught:
        UserKey.of_file(path)
    assert caught.value.__cause__ is None and (not text or text not in caught.value.message)
    with pytest.raises(ConfigError, match="No such file"):
        UserKey.of_file(tmp_path / "none.nk")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nats://h:1?seed=a.nk", "has the name of its credential"),
        ("nats://a:b@h:1?seed=a.nk", "has the name of its credential"),
        ("nats://a@h:1?seed=a.nk,nats://h:2?seed=b.nk", "two seeds"),
        ("nats://a@h:1?sed=a.nk", "unknown option 'sed'"),
    ],
)
def test_bad_url_is_rejected(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        nats_servers(url)


def test_seed_is_that_of_all_servers() -> None:
    found = nats_servers("nats://a@h:1?seed=/x/a.nk,nats://h:2")
    assert (found.urls, found.user, found.seed_file) == (
        ["nats://h:1", "nats://h:2"],
        None,
        Path("/x/a.nk"),
    )
