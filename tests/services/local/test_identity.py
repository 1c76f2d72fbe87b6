import socket
from pathlib import Path

import pytest

from services.local import servers
from services.local.credentials import Credential
from services.local.identity import (
    ClusterIdentity,
    choose_ports,
    key_file,
    read_identity,
    read_key,
    save_credentials,
    save_identity,
    save_key,
    with_kept_passwords,
    with_other_kept,
)
from services.local.plan import UpOptions
from shared.clock import MonotonicClock
from shared.errors import ConfigError
from shared.store import RedisStore
from shared.tenancy.tenant import api_key_record, digest_of
from shared.tenancy.tenant_admin import TenantAdmin, save_api_key, standing_of
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import LIMIT_S


def test_identity_is_read_as_it_was_saved(tmp_path: Path) -> None:
    assert read_identity(tmp_path) is None
    save_credentials(tmp_path, (Credential("decode", "far"),))
    assert read_identity(tmp_path) is None  # a cluster that keeps nothing has none
    identity = ClusterIdentity(nats_port=4222)
    save_identity(tmp_path, identity)
    assert read_identity(tmp_path) == identity != ClusterIdentity(nats_port=4222)
    far = (Credential("decode", "far", "word"),)
    save_credentials(tmp_path, far)
    assert read_identity(tmp_path).credentials == far
    (tmp_path / "kept.json").write_text("{")
    with pytest.raises(ConfigError, match=r"kept\.json cannot be read"):
        read_identity(tmp_path)


def test_processes_keep_their_passwords_and_others_their_credentials() -> None:
    kept = (Credential("decode", "decode-1", "old"), Credential("decode", "far", "word"))
    planned = (Credential("decode", "decode-1", "new"), Credential("prefill", "prefill-1", "new"))
    merged = with_kept_passwords(planned, kept)
    assert [each.password for each in merged] == ["old", "new"]
    assert with_other_kept(merged, kept) == (*merged, kept[1])


def test_ports_are_those_of_the_last_start_unless_others_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "KEPT_PORT_WAIT_S", 0.0)
    options = UpOptions(model_dir=tmp_path, http_port=0)
    http, nats, redis = (free_port() for _ in range(3))
    kept = ClusterIdentity(http_port=http, nats_port=nats, redis_port=redis)
    ports = choose_ports(options, kept, is_kept=True)
    assert ports == {"http_port": http, "nats_port": nats, "redis_port": redis}
    with socket.create_server(("127.0.0.1", nats)), socket.create_server(("127.0.0.1", redis)):
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{nats}, as before.*--nats-port"):
            choose_ports(options, kept, is_kept=True)
        other = UpOptions(model_dir=tmp_path, http_port=0, nats_port=free_port())
        ports = choose_ports(other, kept, is_kept=True)
        assert ports["nats_port"] == other.nats_port and ports["redis_port"] != redis


def test_key_for_a_redis_is_found_again(tmp_path: Path) -> None:
    path = key_file(tmp_path / "clusters", "redis://a")
    assert read_key(path) is None and read_key(None) is None
    save_key(path, "a-key-of-mine")
    assert read_key(key_file(tmp_path / "clusters", "redis://a")) == "a-key-of-mine"
    assert read_key(key_file(tmp_path / "clusters", "redis://b")) is None


async def test_standing_of_a_key(redis_server: RedisServer) -> None:
    url = redis_server.url

    async def standing(tenant_id: str = "standing") -> str:
        return await standing_of(url, "a-key-of-mine", tenant_id)

    assert await standing() == "unknown"
    await save_api_key(url, "a-key-of-mine", "standing")
    assert await standing() == "valid"
    with pytest.raises(ConfigError, match="belongs to another tenant than 'acme'"):
        await standing("acme")
    store = RedisStore(url, MonotonicClock(), timeout_s=LIMIT_S)
    await TenantAdmin(store, lambda: 1.0).revoke("standing", None)
    assert await standing() == "ended"
    await store.write([("DEL", api_key_record(digest_of("a-key-of-mine")))])  # a month later
    await store.close()
    assert await standing() == "ended"
