"""`hearth tenant` and `hearth usage` commands on a real Redis."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import msgspec
import pytest
import redis

from services.cli.tenants import tenant_removal
from services.cli.tenants.tenant_tables import last_days
from services.gateway.tenancy.usage_counter import UsageCounter
from shared.clock import MonotonicClock
from shared.errors import ConfigError
from shared.store import RedisStore
from shared.tenancy.declared_classes import REGION_CLASSES
from shared.tenancy.deletion.tenant_removal import removing
from shared.tenancy.site_usage import usage_at
from shared.tenancy.tenant import TENANT_COPIES, TenantRecord
from shared.tenancy.tenant_copy import (
    SITE_KEYS,
    SITES,
    SigningKey,
    TenantCopy,
)
from tests.services.cli.in_process import call_hearth
from tests.support.servers import RedisServer
from tests.support.services.running import environ_for
from tests.support.waiting import LIMIT_S

Hearth = Callable[..., CompletedProcess[str]]


@pytest.fixture
def hearth(tmp_path: Path, redis_server: RedisServer) -> Iterator[Hearth]:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    environ, url = environ_for(tmp_path), redis_server.url
    yield lambda *arguments: call_hearth((*arguments, "--redis-url", url), environ)


def text(result: CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def tenant_info(hearth: Hearth, tenant_id: str) -> dict:
    return json.loads(text(hearth("tenant", "show", tenant_id, "--json")))


def test_tenant_and_key_commands(hearth: Hearth, redis_server: RedisServer) -> None:
    key = text(hearth("tenant", "add", "team-a", "--requests-per-min", "60", "--zero-retention"))
    assert key.startswith("hearth-")
    twice = hearth("tenant", "add", "team-a")
    assert twice.returncode == 2 and "exists" in twice.stderr
    assert tenant_info(hearth, "team-a")["tenant"]["requests_per_min"] == 60
    limits = ("--requests-per-min", "unlimited", "--concurrency", "0", "--allowed-models", "a, b")
    limited = hearth("tenant", "limits", "team-a", *limits, "--no-zero-retention")
    assert "unlimited" in text(limited) and "a, b" in text(limited)
    note = "note: a, b: no model of the catalogue and no alias of this name yet"
    assert note in limited.stderr
    assert "note" not in hearth("tenant", "limits", "team-a", "--weight", "1").stderr
    tenant = tenant_info(hearth, "team-a")["tenant"]
    assert "requests_per_min" not in tenant and "is_zero_retention" not in tenant
    assert (tenant["concurrency"], tenant["allowed_models"]) == (0, ["a", "b"])
    text(hearth("tenant", "limits", "team-a", "--allowed-models", "", "--allowed-regions", "all"))
    assert tenant_info(hearth, "team-a")["tenant"]["allowed_models"] == []
    more = text(hearth("api-key", "team-a"))
    assert more != key
    rotated = hearth("tenant", "rotate", "team-a", "--keep-s", "500")
    first, second, third = tenant_info(hearth, "team-a")["keys"]
    assert text(rotated) not in (key, more)
    assert first["key_id"] in rotated.stderr and "500 s" in rotated.stderr
    assert 0 < first["expires_at"] - time.time() <= 500
    assert "expires_at" not in third or third["expires_at"] is None
    assert text(hearth("tenant", "revoke", "team-a", "--key", second["key_id"])) == second["key_id"]
    again = hearth("tenant", "revoke", "team-a", "--key", second["key_id"])
    assert again.returncode == 2 and "nothing to revoke" in again.stderr
    states = text(hearth("tenant", "show", "team-a"))
    assert "valid until" in states and "revoked" in states
    with redis.Redis.from_url(redis_server.url) as client:
        names = b" ".join(client.scan_iter())
        values = [client.hgetall(name) for name in client.scan_iter(_type="HASH")]
    for secret in (key, more, text(rotated)):
        assert secret not in f"{names!r} {values!r}"


def test_list_shows_all_tenants(hearth: Hearth, redis_server: RedisServer) -> None:
    text(hearth("tenant", "add", "team-b", "--weight", "2.5", "--concurrency", "8"))
    text(hearth("api-key", "team-a"))
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset("hearth:tenants", "team-c", "{")
    a, b, c = text(hearth("tenant", "list")).splitlines()[1:]
    assert a.startswith("team-a") and a.count("unlimited") == 5
    assert "2.5" in b and " 8 " in b
    assert "unreadable" in c
    records = json.loads(text(hearth("tenant", "list", "--json")))
    assert list(records) == ["team-a", "team-b", "team-c"] and records["team-c"] is None


def test_region_class_is_one_that_is_declared(hearth: Hearth, redis_server: RedisServer) -> None:
    none = hearth("tenant", "add", "team-a", "--region-class", "eu")
    assert none.returncode == 2 and "no gateway has declared any" in none.stderr
    with redis.Redis.from_url(redis_server.url) as client:
        client.set(REGION_CLASSES, '{"eu": ["fr", "de"]}')
    text(hearth("tenant", "add", "team-a", "--region-class", "eu"))
    assert tenant_info(hearth, "team-a")["tenant"]["region_class"] == "eu"
    (row,) = text(hearth("tenant", "list")).splitlines()[1:]
    assert " eu " in row
    other = hearth("tenant", "limits", "team-a", "--region-class", "us")
    assert other.stderr.strip() == (
        "hearth: no region class 'us': declared are eu=de,fr (HEARTH_REGION_CLASSES)"
    )
    assert "region class" in text(hearth("tenant", "limits", "team-a", "--region-class", "none"))
    assert "region_class" not in tenant_info(hearth, "team-a")["tenant"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "nobody"], "tenant 'nobody' does not exist"),
        (["limits", "nobody", "--weight", "2"], "tenant 'nobody' does not exist"),
        (["limits", "team-a", "--weight", "0"], "invalid tenant limits"),
        (["limits", "team-a", "--priority", "5"], "invalid tenant limits"),
        (["limits", "team-a", "--concurrency", "many"], "neither an integer >= 0"),
        (["rotate", "nobody"], "tenant 'nobody' does not exist"),
        (["rotate", "team-a", "--key", "none"], "has no key 'none'"),
        (["revoke", "team-a", "--key", "none"], "has no key 'none'"),
    ],
)
def test_invalid_arguments_are_rejected(hearth: Hearth, arguments: list[str], words: str) -> None:
    text(hearth("tenant", "add", "team-a"))
    result = hearth("tenant", *arguments)
    assert result.returncode == 2
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert len(tenant_info(hearth, "team-a")["keys"]) == 1


def test_usage(hearth: Hearth, redis_server: RedisServer) -> None:
    text(hearth("api-key", "team-a"))
    text(hearth("api-key", "team-b"))

    async def use() -> None:
        store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
        usage = UsageCounter(store, MonotonicClock(), writer_id="w", now=time.time)
        for tenant_id, amount in (("team-a", 1200), ("team-b", 30)):
            usage.count(
                TenantRecord(tenant_id=tenant_id), "m", {"requests": 1, "input_tokens": amount}
            )
        await usage.stop()
        await store.close()

    asyncio.run(use())
    rows = json.loads(text(hearth("usage", "--days", "2", "--json")))
    assert [(row["tenant_id"], row["input_tokens"], row["requests"]) for row in rows] == [
        ("team-a", 1200, 1),
        ("team-b", 30, 1),
    ]
    table = text(hearth("usage"))
    assert "1,200" in table and "1,230" in table
    assert "1,230" not in text(hearth("usage", "--tenant", "team-a"))
    unknown = hearth("usage", "--tenant", "nobody")
    assert unknown.returncode == 2 and "tenant 'nobody' does not exist" in unknown.stderr


def test_days_are_utc_and_bounded() -> None:
    assert last_days(3, 86_400.0 * 365 + 1) == ["1971-01-01", "1970-12-31", "1970-12-30"]
    for count in (0, -1, 401):
        with pytest.raises(ConfigError):
            last_days(count, 0.0)


def test_tenants_over_sites(hearth: Hearth, redis_server: RedisServer) -> None:
    unlinked = hearth("tenant", "add", "team-a", "--sites", "b")
    assert unlinked.returncode == 2
    assert "no gateway has heard a site 'b' over a link: this site has no links" in unlinked.stderr
    record = TenantRecord(tenant_id="team-b", sites=("here",), concurrency=7)
    copy = TenantCopy(home="b", site="here", version=1, record=record)
    signed = msgspec.msgpack.encode(SigningKey.of_secret("of b").sign(copy))
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset(SITES, "b", "")
        client.hset(TENANT_COPIES, mapping={"b/team-b": signed, "b/broken": b"-"})
        client.hset(SITE_KEYS, "b", b"key")
        of_b = usage_at("team-a", last_days(1, time.time())[0], "b")
        client.hset(of_b, mapping={"requests:m": 5, "requests:[/red]m": 7})
        text(hearth("tenant", "add", "team-a", "--sites", "b"))
        assert tenant_info(hearth, "team-a")["tenant"]["sites"] == ["b"]
        listed = text(hearth("tenant", "list"))
        assert "here, b" in listed and "of b" in listed and "unreadable" in listed
        assert tenant_info(hearth, "b/team-b")["tenant"]["concurrency"] == 7
        assert "of b" in text(hearth("tenant", "show", "b/team-b"))
        edited = hearth("tenant", "limits", "b/team-b", "--concurrency", "9")
        assert edited.returncode == 2
        assert "'b/team-b' has its home at site 'b': change it there" in edited.stderr
        table = text(hearth("usage", "--tenant", "team-a"))
        assert "site" in table and " b " in table and "[/red]m" in table
        text(hearth("tenant", "limits", "team-a", "--sites", "none"))
        assert "sites" not in tenant_info(hearth, "team-a")["tenant"]
        text(hearth("tenant", "trust", "b"))
        assert client.hgetall(SITE_KEYS) == {}
    assert "no key of a site 'b' is known" in hearth("tenant", "trust", "b").stderr


def test_removed_tenant_leaves_only_its_usage(
    hearth: Hearth, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_removal, "BEGIN_S", 0.0)
    text(hearth("tenant", "add", "gone", "--requests-per-min", "5"))
    text(hearth("tenant", "add", "gone-too"))  # a name that begins with the other's
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset("hearth:gone:usage:2026-01-01", "requests:m", 3)
        client.hset(f"hearth:gone:usage:{last_days(1, time.time())[0]}", "requests:m", 2)
        client.zadd("hearth:gone:prefixes", {"0ff": 1})
        client.hset("hearth:gone:prefix:0ff", "model", "m")
        client.hset("hearth:model:aliases:gone", "fast", '{"model":"m"}')
        removed = hearth("tenant", "remove", "gone")
        assert removed.returncode == 0
        assert "no index follows" in removed.stderr
        left = {each.decode() for each in client.keys("hearth:*gone*")}
        days = {f"hearth:gone:usage:{each}" for each in ("2026-01-01", *last_days(1, time.time()))}
        assert left - {removing("gone")} == {*days, "hearth:gone-too:keys"}
        assert client.keys("hearth:api_key:*"), "that of the other tenant"
        text(hearth("tenant", "remove", "gone", "--with-usage"))  # an interrupted one is repeated
        assert not client.exists(*days)
    early = hearth("tenant", "add", "gone")
    assert early.returncode == 2 and "is being removed" in early.stderr
    nobody = hearth("tenant", "remove", "nobody")
    assert nobody.returncode == 2 and "does not exist" in nobody.stderr
    foreign = hearth("tenant", "remove", "b/gone")
    assert foreign.returncode == 2 and "home at site 'b'" in foreign.stderr
