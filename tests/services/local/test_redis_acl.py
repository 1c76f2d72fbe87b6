"""Redis users of roles, on a real server: what each may do, and what it may not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from services.gateway.dialects.responses.storage import scripts
from services.gateway.tenancy.redis_memory import RedisMemory
from services.local.redis_acl import REDIS_ROLES, acl_line, acl_rules
from shared.clock import MonotonicClock
from shared.model_registry.admin import RegistryAdmin
from shared.model_registry.reader import RegistryReader
from shared.store import RedisStore, StoreRejected
from shared.tenancy.stored_responses import response_keys
from shared.tenancy.tenant import RECORD_KEYS
from shared.tenancy.tenant_admin import TenantAdmin
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]
PASSWORD = "a secret of the role"
# Sources whose Lua scripts and batches a role runs.
SOURCES = {
    "gateway": ("services/gateway", "shared/tenancy", "shared/model_registry"),
    "kv_index": (
        *("services/kv_index", "shared/tenancy/prefixes/pinned_prefix.py"),
        *("shared/tenancy/audit.py", "shared/tenancy/deletion/kv_drops.py"),
    ),
    "host": ("shared/model_registry",),
    "operator": ("services/cli", "shared/backup", "shared/tenancy", "shared/model_registry"),
}
OWN_KEYS = {
    "gateway": ("hearth:acme:meter", "hearth:acme:usage:2026-01-01", "hearth:api_key:0ff"),
    "kv_index": ("hearth:acme:prefix:0ff", "hearth:acme:prefixes", "hearth:kv_drops"),
    "host": ("hearth:generation", "hearth:model:catalogue", "hearth:model:catalogue:version"),
    "operator": ("hearth:tenants", "hearth:acme:keys", "hearth:audit"),
}
FOREIGN_KEYS = {
    "gateway": ("hearth:audit", "other"),
    "kv_index": (
        *("hearth:api_key:0ff", "hearth:acme:meter", "hearth:acme:response:1"),
        *("hearth:audit", "other"),
    ),
    "host": ("hearth:tenants", "hearth:api_key:0ff", "hearth:acme:usage:2026-01-01", "other"),
    "operator": ("other",),
}
FORBIDDEN = (
    "FLUSHALL", "FLUSHDB", "KEYS *", "SCAN 0", "CONFIG GET *", "ACL LIST", "ACL WHOAMI",
    "CLIENT LIST", "CLIENT KILL TYPE normal", "MONITOR", "DEBUG SLEEP 0", "SHUTDOWN NOSAVE",
    "SAVE", "BGSAVE", "REPLICAOF NO ONE", "SCRIPT FLUSH", "SUBSCRIBE a", "PUBLISH a b", "INFO",
    "SWAPDB 0 1", "MIGRATE a 1 b 0 1", "RENAME hearth:tenants hearth:x", "DUMP hearth:tenants",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    admin = redis.Redis.from_url(server.url)
    for role in REDIS_ROLES:
        admin.execute_command("ACL", "SETUSER", role, *acl_rules(role, PASSWORD))
    admin.close()
    yield server
    server.stop()


def url_of(server: RedisServer, role: str) -> str:
    return f"redis://{role}:{PASSWORD}@127.0.0.1:{server.port}/0"


def client_of(server: RedisServer, role: str) -> redis.Redis:
    return redis.Redis.from_url(url_of(server, role))


@pytest.mark.parametrize("role", REDIS_ROLES)
def test_role_reaches_its_keys_and_no_others(server: RedisServer, role: str) -> None:
    client = client_of(server, role)
    for key in OWN_KEYS[role]:
        assert client.exists(key) in (0, 1)
        assert client.eval("return redis.call('EXISTS', KEYS[1])", 1, key) in (0, 1)
    for key in FOREIGN_KEYS[role]:
        with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)no permission|NOPERM"):
            client.exists(key)
        with pytest.raises(redis.exceptions.ResponseError):
            client.eval("return redis.call('EXISTS', ARGV[1])", 0, key)
    client.close()


@pytest.mark.parametrize("role", REDIS_ROLES)
def test_role_may_not_administer_the_server(server: RedisServer, role: str) -> None:
    client = client_of(server, role)
    for command in FORBIDDEN:
        with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission"):
            client.execute_command(*command.split())
    client.close()
    with pytest.raises(redis.exceptions.RedisError):
        redis.Redis.from_url(url_of(server, role).replace(PASSWORD, "wrong")).ping()


@pytest.mark.parametrize("role", REDIS_ROLES)
def test_role_may_run_all_commands_of_its_sources(role: str) -> None:
    """Those of Lua scripts, and of batches such as `("HSET", …)`."""
    found = set()
    for name in SOURCES[role]:
        path = ROOT / name
        for file in [path] if path.is_file() else path.rglob("*.py"):
            text = file.read_text()
            found |= {each.lower() for each in re.findall(r"redis\.p?call\(['\"](\w+)", text)}
            if "store" in text:
                found |= {
                    each.lower()
                    for each in re.findall(r"[(\[]\"([A-Z]{3,})\", ", text)
                    if each.lower() in ALL_COMMANDS
                }
    assert found, "the sources have moved"
    missing = found - {each.partition("|")[0] for each in REDIS_ROLES[role].commands}
    if role in ("gateway", "kv_index"):  # they share modules with operators
        missing -= {"xadd", "xrevrange"}
    assert missing == set()


ALL_COMMANDS = {each for role in REDIS_ROLES.values() for each in role.commands} | {
    "setex", "append", "incr", "decr", "lpush", "rpush", "sadd", "srem", "persist", "hincrbyfloat",
    "getdel", "getset", "mset", "mget", "rename", "copy", "unlink", "pexpire", "expireat",
}  # fmt: skip


async def test_gateway_stores_responses_within_the_memory_of_redis(server: RedisServer) -> None:
    operator = RedisStore(url_of(server, "operator"), MonotonicClock(), timeout_s=LIMIT_S)
    for tenant in ("acme", "other"):
        await TenantAdmin(operator, lambda: 0.0).add(tenant, {}, f"key of {tenant}")
    await operator.close()
    store = RedisStore(url_of(server, "gateway"), MonotonicClock(), timeout_s=LIMIT_S)
    memory = RedisMemory(store, MonotonicClock())
    await memory.read()
    assert memory.use is not None and memory.use.used
    for tenant, outcome in (("acme", [b"stored", 0]), ("other", [b"stored", 1])):
        arguments = ["resp_1", b"x" * 3000, "", 60, 1000.0, 1 << 20, tenant, "", 5000, ",,", 0.0]
        keys = [*response_keys(tenant), *RECORD_KEYS]
        assert await store.evaluate(scripts.SAVE, keys, arguments) == outcome
    await store.close()


async def test_operator_makes_tenants_that_others_may_not(server: RedisServer) -> None:
    for role, is_allowed in (("operator", True), ("kv_index", False), ("host", False)):
        store = RedisStore(url_of(server, role), MonotonicClock(), timeout_s=LIMIT_S)
        try:
            await TenantAdmin(store, lambda: 0.0).add(f"made-by-{role}", {}, f"key of {role}")
            assert is_allowed
        except StoreRejected:
            assert not is_allowed
        await store.close()


async def test_roles_read_the_registry_that_the_operator_writes(server: RedisServer) -> None:
    stores = {
        role: RedisStore(url_of(server, role), MonotonicClock(), timeout_s=LIMIT_S)
        for role in ("operator", "host", "gateway", "kv_index")
    }
    await RegistryAdmin(stores["operator"], lambda: 0.0).add("m", "/x")
    for role in ("host", "gateway"):
        reader = RegistryReader(stores[role], MonotonicClock())
        await reader.refresh()
        assert list(reader.models) == ["m"]
    with pytest.raises(StoreRejected):
        await RegistryReader(stores["kv_index"], MonotonicClock()).refresh()
    await asyncio.gather(*(each.close() for each in stores.values()))


def test_lines_have_digests_in_place_of_passwords() -> None:
    line = acl_line("gateway", "a secret of the role")
    assert line.startswith("user gateway reset on #") and "secret" not in line
    assert "~hearth:*:meter" in line and "+@" not in line and "~*" not in line.split()
