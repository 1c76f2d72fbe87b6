"""What the previous release wrote is read, and what this one writes is what that one reads.

The records are made by `python -m tests.skew.record` with the code of the release that
`previous_release.txt` names.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from services.cli.cluster.service_options import DEMO_MODEL_NAME
from services.gateway.dialects.responses.storage.store import ResponseStore
from shared import messages
from shared.clock import MonotonicClock
from shared.kv_wire import frames
from shared.store import RedisStore
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.tenant_admin import TenantAdmin
from tests.services.cli.in_process import call_hearth
from tests.skew.contract import breaks, parsed
from tests.skew.dialects import output_text
from tests.skew.record import RECORDED, TENANT
from tests.skew.samples import sample_of
from tests.support.cluster.chaos_cluster import TENANT as CHAOS
from tests.support.servers import RedisServer
from tests.surface.recording import RECORDS

SAMPLES = json.loads((RECORDED / "samples.json").read_text())
REDIS = json.loads((RECORDED / "redis.json").read_text())
# Breaks that are meant, each with what keeps the two releases apart.
_LEASES = "limits over sites are leased: an older site gets a Failure, and decides on its part"
MEANT: dict[str, str] = {
    "ApplyLimits is gone": _LEASES,
    "LimitsApplied is gone": _LEASES,
}


def test_messages_of_the_previous_release_are_read() -> None:
    for name, data in SAMPLES["messages"].items():
        if f"{name} is gone" in MEANT:
            continue
        sent = msgspec.msgpack.decode(bytes.fromhex(data))
        read = msgspec.msgpack.decode(bytes.fromhex(data), type=getattr(messages, name))
        assert has_all(msgspec.to_builtins(read, builtin_types=(bytes,)), sent), name


def test_records_of_the_data_plane_are_read() -> None:
    for name, data in SAMPLES["records"].items():
        encoded = bytes.fromhex(data)
        assert frames.decode_prefix(encoded[: frames.PREFIX.size]) == len(encoded) - 12
        read = frames.decode_record(encoded[frames.PREFIX.size :])
        sent = msgspec.msgpack.decode(encoded[frames.PREFIX.size :])
        assert type(read).__name__ == name
        assert has_all(msgspec.to_builtins(read, builtin_types=(bytes,)), sent), name


def test_records_of_this_release_have_all_fields_of_the_previous_one() -> None:
    """And no other type: it would not know one."""
    for name, data in SAMPLES["records"].items():
        body = bytes.fromhex(data)[frames.PREFIX.size :]
        kind = getattr(frames, name)
        sent = msgspec.to_builtins(sample_of(kind), builtin_types=(bytes,))
        assert has_fields(sent, msgspec.msgpack.decode(body)), name


@pytest.mark.parametrize("record", ["messages.txt", "redis.txt"])
def test_types_only_get_fields_with_defaults(record: str) -> None:
    before, now = (parsed((folder / record).read_text()) for folder in (RECORDED, RECORDS))
    found = [*breaks(before, now)]
    assert [each for each in found if each not in MEANT] == []


def has_all(read: Any, sent: Any) -> bool:
    """Whether what was sent is in what was read, which may have more fields."""
    if isinstance(sent, dict):
        return all(name in read and has_all(read[name], each) for name, each in sent.items())
    if isinstance(sent, list | tuple):
        return len(read) >= len(sent) and all(map(has_all, read, sent))
    return bool(read == sent)


def has_fields(sent: Any, known: Any) -> bool:
    if isinstance(known, dict):
        return all(name in sent and has_fields(sent[name], each) for name, each in known.items())
    return True


# ── Redis ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A Redis with what the previous release wrote."""
    server = RedisServer()
    client = redis.Redis.from_url(server.url, encoding="latin-1")
    write = {
        "string": client.set,
        "hash": lambda key, fields: client.hset(key, mapping=fields),
        "set": lambda key, members: client.sadd(key, *members),
        "zset": lambda key, members: client.zadd(key, dict(members)),
        "stream": lambda key, items: [client.xadd(key, item, id=at) for at, item in items],
    }
    for key, (kind, value) in REDIS["keys"].items():
        write[kind](key, value)
    yield server.url
    server.stop()


@pytest.fixture
async def store(redis_url: str) -> Any:
    store = RedisStore(redis_url, MonotonicClock(), timeout_s=5.0)
    yield store
    await store.close()


def hearth(redis_url: str, folder: Path, *words: str) -> str:
    environ = {"HEARTH_REDIS_URL": redis_url, "COLUMNS": "200", "XDG_STATE_HOME": str(folder)}
    result = call_hearth(words, environ)
    assert result.returncode == 0, result.stderr
    return result.stdout


async def test_tenants_keys_and_usage_are_read(store: RedisStore) -> None:
    admin = TenantAdmin(store, time.time)
    records = await admin.all()
    one, eu = records[TENANT], records["team-eu"]
    assert one is not None and eu is not None
    assert (one.requests_per_min, one.concurrency, one.priority) == (600, 16, 2)
    assert (eu.allowed_regions, eu.is_zero_retention) == (("eu",), True)
    assert await admin.standing(CHAOS, REDIS["api_key"]) == "valid"
    (day,) = (key.rpartition(":")[2] for key in REDIS["keys"] if ":usage:" in key)
    (row,) = await admin.usage([CHAOS], [date.fromisoformat(day).isoformat()])
    stored = REDIS["keys"][f"hearth:{CHAOS}:usage:{day}"][1]
    assert row.output_tokens == int(stored[f"output_tokens:{DEMO_MODEL_NAME}"])


async def test_stored_responses_are_read(store: RedisStore) -> None:
    counted: list[str] = []
    responses = ResponseStore(
        store,
        MonotonicClock(),
        region="",
        now=time.time,
        count=counted.append,
        max_all_bytes=lambda: 1 << 30,
    )
    tenant = (await TenantAdmin(store, time.time).all())[CHAOS]
    assert tenant is not None
    assert REDIS["responses"]
    for response_id, text in REDIS["responses"].items():
        record = await responses.get(tenant, response_id, lambda num_bytes: None)
        assert output_text(json.loads(record.response)) == text
    await responses.stop()


async def test_named_prefixes_are_read(store: RedisStore) -> None:
    entries = await pinned_prefix.entries(store, CHAOS)
    assert [*entries] == ["greeting"]
    found = await pinned_prefix.load(store, CHAOS, "greeting", entries["greeting"].digest)
    assert found is not None and found.model == DEMO_MODEL_NAME


def test_operators_see_what_was_done(redis_url: str, tmp_path: Path) -> None:
    assert DEMO_MODEL_NAME in hearth(redis_url, tmp_path, "model", "aliases")
    audit = hearth(redis_url, tmp_path, "audit")
    assert TENANT in audit and "tenant add" in audit
    assert TENANT in hearth(redis_url, tmp_path, "tenant", "list")
