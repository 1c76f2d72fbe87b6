"""Restores into a Redis in use, into another cluster's, and with lists of what was taken back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from shared.backup.backup import make_backup
from shared.backup.backup_file import BackupFile
from shared.backup.restore import Restore
from shared.backup.restore_texts import Restored
from shared.clock import MonotonicClock
from shared.errors import ConfigError
from shared.store import RedisStore
from shared.tenancy import audit
from shared.tenancy.deletion import kv_drops, retractions, site_drops
from shared.tenancy.deletion.kv_drops import DropProgress
from shared.tenancy.deletion.tenant_removal import TenantRemoval, removing
from shared.tenancy.model_alias_admin import ModelAliasAdmin
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix
from shared.tenancy.tenant import GENERATION, TENANTS, usage_of
from shared.tenancy.tenant_admin import TenantAdmin, key_id_of
from tests.support.servers import RedisServer

DAY = time.strftime("%Y-%m-%d", time.gmtime())


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


class Rig:
    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.store = RedisStore(server.url, MonotonicClock(), timeout_s=10.0)
        self.client = redis.Redis.from_url(server.url)
        self.client.flushall()
        self.file, self.list_file = folder / "b", folder / "list"
        self.admin = TenantAdmin(self.store, time.time, self.list_file)
        self.removal = TenantRemoval(self.store, time.time, self.list_file)

    async def backup(self) -> None:
        await make_backup(self.store, self.file, time.time())

    async def restore(self, *, is_forced: bool = False, is_dry: bool = False) -> Restored:
        listed = retractions.read_file(self.list_file) if self.list_file.exists() else []
        backup = BackupFile(self.file)
        restore = Restore(self.store, backup, time.time(), writes=not is_dry, is_forced=is_forced)
        return await restore.run(listed)

    async def standing(self, tenant_id: str, key: str) -> str:
        return await self.admin.standing(tenant_id, key)


@pytest_asyncio.fixture
async def rig(server: RedisServer, tmp_path: Path) -> AsyncIterator[Rig]:
    found = Rig(server, tmp_path)
    await found.admin.add("acme", {"concurrency": 4}, "key-1")
    yield found
    await found.store.close()
    found.client.close()


def prefix_of(tenant_id: str) -> PinnedPrefix:
    message = {"role": "system", "content": "a text"}
    return PinnedPrefix(
        name="rules", tenant_id=tenant_id, model="m", messages=[message], created_at=1
    )


async def test_redis_in_use_keeps_what_it_has(rig: Rig) -> None:
    aliases = ModelAliasAdmin(rig.store, time.time)
    await aliases.put("old", "m-1")
    await aliases.put("gone", "m-1")
    rig.client.hset(usage_of("acme", DAY), "requests:m", 5)
    await rig.backup()
    await aliases.put("old", "m-2")
    await aliases.remove("gone")
    await rig.admin.change("acme", {"concurrency": 9})
    await rig.admin.add_key("acme", "key-2")
    rig.client.hset(usage_of("acme", DAY), "requests:m", 8)
    result = await rig.restore()
    assert (await rig.admin.one("acme")).concurrency == 9
    assert [await rig.standing("acme", each) for each in ("key-1", "key-2")] == ["valid"] * 2
    assert [(row.alias, row.model) for row in await aliases.all()] == [
        ("gone", "m-1"),
        ("old", "m-2"),
    ]
    assert rig.client.hget(usage_of("acme", DAY), "requests:m") == b"8"
    assert {kind: count for kind, count in result.added.items() if count} == {"aliases": 1}


async def test_what_was_taken_back_stays_so_without_the_list_in_redis(rig: Rig) -> None:
    for name in ("gone", "quiet", "narrow"):
        await rig.admin.add(name, {}, f"key of {name}")
        await pinned_prefix.save(rig.store, prefix_of(name), time.time())
    await rig.backup()
    await rig.admin.rotate("acme", "key-2", keep_s=0.0, key_id=None)
    await rig.removal.remove("gone", with_usage=False)
    await rig.admin.change("quiet", {"is_zero_retention": True})
    await rig.admin.change("narrow", {"allowed_regions": ("eu",)})
    rig.client.flushall()
    await rig.restore()
    assert sorted(await rig.admin.all()) == ["acme", "narrow", "quiet"]
    assert await rig.standing("acme", "key-1") == "ended"
    assert await rig.standing("gone", "key of gone") == "unknown"
    assert (await rig.admin.one("quiet")).is_zero_retention
    assert (await rig.admin.one("narrow")).allowed_regions == ("eu",)
    for name in ("gone", "quiet", "narrow"):
        assert not await pinned_prefix.entries(rig.store, name)
    ordered = {(e.drop.tenant_id, e.drop.reason) for e in await kv_drops.orders(rig.store)}
    assert ordered == {("gone", "removed"), ("quiet", "zero_retention"), ("narrow", "regions")}
    assert rig.list_file.stat().st_mode & 0o777 == 0o600
    # the list is in Redis again: the file is not needed for a second restore
    rig.list_file.unlink()
    assert sorted((await rig.restore()).added.elements()) == []
    assert await rig.standing("acme", "key-1") == "ended"


async def test_order_that_a_site_has_not_confirmed_is_ordered_again(rig: Rig) -> None:
    began = time.time()
    for name in ("first", "second", "third"):
        drop = await kv_drops.order(rig.store, name, "removed", began)
        progress = DropProgress(finished_at=None if name == "third" else 1.0)
        await kv_drops.report(rig.store, drop.number, progress)
    assert await site_drops.confirm(rig.store, "far", kv_drops.first_number(began) + 1)
    await rig.backup()
    rig.client.flushall()
    await rig.restore()
    assert [e.drop.tenant_id for e in await kv_drops.orders(rig.store)] == ["second", "third"]
    await rig.restore()
    assert len(await kv_drops.orders(rig.store)) == 2


async def test_tenant_made_anew_gets_no_key_of_the_one_before(rig: Rig) -> None:
    await rig.backup()
    await rig.removal.remove("acme", with_usage=True)
    for each in await kv_drops.orders(rig.store):  # as if all were done long ago
        rig.client.hdel(kv_drops.ORDERS, each.drop.number)
    rig.client.delete(removing("acme"))
    await rig.admin.add("acme", {}, "key-2")
    await rig.restore()
    assert await rig.standing("acme", "key-1") == "unknown"
    assert await rig.standing("acme", "key-2") == "valid"
    assert (await rig.admin.one("acme")).concurrency is None


async def test_usage_after_a_loss_is_added_once(rig: Rig) -> None:
    key = usage_of("acme", DAY)
    rig.client.hset(key, "requests:m", 5)
    await rig.backup()
    rig.client.flushall()
    rig.client.hset(key, "requests:m", 2)  # gateways go on
    await rig.restore(is_dry=True)
    assert rig.client.hget(key, "requests:m") == b"2"
    for _ in range(2):
        await rig.restore()
        assert rig.client.hget(key, "requests:m") == b"7"


async def test_counters_and_lines_go_on(rig: Rig) -> None:
    await audit.record(rig.store, who="a", command="first", arguments="{}", outcome="done")
    await rig.backup()
    rig.client.flushall()
    await audit.record(rig.store, who="a", command="second", arguments="{}", outcome="done")
    started_at = int(time.time())
    await rig.restore()
    assert [each.command for each in await audit.newest(rig.store, 9)] == ["first", "second"]
    await audit.record(rig.store, who="a", command="third", arguments="{}", outcome="done")
    assert [each.command for each in await audit.newest(rig.store, 1)] == ["third"]
    assert await kv_drops.last_number(rig.store) >= started_at
    changes = await pinned_prefix.changes(rig.store, known=3)
    assert changes.version >= started_at
    assert changes.tenants is None


async def test_other_beginning_is_refused_unless_forced(rig: Rig) -> None:
    await rig.backup()
    rig.client.flushall()
    await rig.admin.add("other", {}, "key of other")
    with pytest.raises(ConfigError, match="records of another beginning") as raised:
        await rig.restore()
    assert "\n" not in raised.value.message
    assert await rig.admin.all() == {"other": await rig.admin.one("other")}
    await rig.restore(is_forced=True)
    assert sorted(await rig.admin.all()) == ["acme", "other"]


async def test_texts_that_are_withdrawn_meanwhile_are_not_in_the_backup(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pinned_prefix.save(rig.store, prefix_of("acme"), time.time())
    load, reads = pinned_prefix.load, list[str]()

    async def load_and_switch(store: RedisStore, tenant_id: str, name: str) -> PinnedPrefix | None:
        found = await load(store, tenant_id, name)
        if not reads:
            await rig.admin.change(tenant_id, {"is_zero_retention": True})
        reads.append(tenant_id)
        return found

    monkeypatch.setattr(pinned_prefix, "load", load_and_switch)
    await rig.backup()
    assert reads == ["acme"]
    kinds = [type(each).__name__ for each in BackupFile(rig.file).records()]
    assert "StoredTenant" in kinds
    assert "StoredPrefix" not in kinds


async def test_empty_redis_is_not_backed_up(rig: Rig) -> None:
    rig.client.delete(GENERATION, TENANTS)
    with pytest.raises(ConfigError, match="nothing to back up"):
        await rig.backup()
    assert not rig.file.exists()


async def test_list_that_cannot_be_written_stops_no_revocation(rig: Rig, tmp_path: Path) -> None:
    admin = TenantAdmin(rig.store, time.time, tmp_path / "missing" / "list")
    with pytest.raises(ConfigError, match="it is done, but is not in the list"):
        await admin.revoke("acme", key_id_of("key-1"))
    assert await rig.standing("acme", "key-1") == "ended"


@pytest.mark.parametrize("line", ["{", '{"kind":"new"}', "\x00"])
async def test_unreadable_list_is_refused(rig: Rig, line: str) -> None:
    await rig.backup()
    await rig.admin.revoke("acme", None)
    with rig.list_file.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match="line 2 is unreadable"):
        await rig.restore()
