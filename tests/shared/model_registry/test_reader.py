"""What a process knows of the model registry, and what it keeps while Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import structlog.testing

from shared.model_registry.admin import RegistryAdmin
from shared.model_registry.reader import POLL_S, RegistryReader
from shared.model_registry.record import REGISTRY, REGISTRY_VERSION
from shared.store import RedisStore, Store, StoreRejected, StoreUnavailable
from shared.tenancy.tenant import GENERATION
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S


class Polls:
    """A clock whose sleeper continues when the test says so."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self._next = asyncio.Event()
        self._asleep = asyncio.Event()

    def now(self) -> float:
        return sum(self.delays)

    async def sleep(self, delay_s: float) -> None:
        self.delays.append(delay_s)
        self._asleep.set()
        await self._next.wait()
        self._next.clear()

    async def wait(self) -> None:
        """Until the next poll has ended."""
        async with asyncio.timeout(LIMIT_S):
            await self._asleep.wait()

    async def poll(self) -> None:
        self._asleep.clear()
        self._next.set()
        await self.wait()


class CountingStore:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.replies: list[Any] = []

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        self.replies.append(await self.store.evaluate(script, keys, arguments))
        return self.replies[-1]


@pytest.fixture
def reader(store: Store) -> RegistryReader:
    return RegistryReader(store, Polls())


async def test_changes_are_read_and_reported_once(
    admin: RegistryAdmin, reader: RegistryReader
) -> None:
    seen: list[list[str]] = []
    reader.on_change(lambda: seen.append(list(reader.models)))
    assert not reader.is_read and reader.models == {}
    await admin.add("b", "/x")
    await admin.add("a", "/x")
    for _ in range(2):
        await reader.refresh()
    assert reader.is_read and seen == [["a", "b"]]
    before = reader.models
    await admin.pin("a")
    await admin.remove("b")
    await reader.refresh()
    assert seen == [["a", "b"], ["a"]] and reader.models["a"].is_pinned
    await admin.unpin("a")
    await admin.pin("a")
    await reader.refresh()
    assert len(seen) == 2  # nothing has changed
    assert list(before) == ["a", "b"] and not before["a"].is_pinned  # a snapshot


async def test_empty_registry_is_a_first_read(store: Store, reader: RegistryReader) -> None:
    seen: list[int] = []
    reader.on_change(lambda: seen.append(1))
    await store.write([("SET", GENERATION, "g")])
    await reader.refresh()
    await reader.refresh()
    assert reader.is_read and seen == [1]


async def test_unchanged_registry_costs_a_short_reply(admin: RegistryAdmin, store: Store) -> None:
    counting = CountingStore(store)
    reader = RegistryReader(counting, Polls())  # type: ignore[arg-type]
    await admin.add("m", "/x")
    for _ in range(3):
        await reader.refresh()
    assert [len(reply) for reply in counting.replies] == [4, 3, 3]


async def test_unreadable_record_affects_its_model_only_and_is_logged_once(
    admin: RegistryAdmin, store: Store, reader: RegistryReader
) -> None:
    await admin.add("m", "/x")
    await admin.add("n", "/x")
    await reader.refresh()
    old = reader.models["m"]
    await store.write([("HSET", REGISTRY, "m", "{"), ("HSET", REGISTRY, "new", b"\xff")])
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await admin.set_fields("n", {"priority": len(logs) + 1})
            await reader.refresh()
            await admin.set_fields("n", {"priority": 9})
            await reader.refresh()
    assert sorted(each["model"] for each in logs) == ["m", "new"]
    assert reader.unreadable == {"m", "new"} and dict(reader.models).keys() == {"m", "n"}
    assert reader.models["m"] is old and reader.models["n"].priority == 9
    await admin.remove("m")
    await admin.remove("new")
    await reader.refresh()
    assert reader.unreadable == frozenset() and list(reader.models) == ["n"]


@pytest.mark.parametrize(
    "record",
    [
        '{"name": "other", "revisions": [{"name": "r1", "source": "/x"}]}',
        '{"name": "m", "revisions": []}',
        '{"name": "m", "revisions": [{"name": "r1", "source": "/x", "weight": 0}]}',
        '{"name": "m", "revisions": [{"name": "r", "source": "/"}, {"name": "r", "source": "/"}]}',
    ],
)
async def test_impossible_record_is_unreadable(
    store: Store, reader: RegistryReader, record: str
) -> None:
    await store.write([("HSET", REGISTRY, "m", record), ("INCRBY", REGISTRY_VERSION, 1)])
    await reader.refresh()
    assert reader.unreadable == {"m"} and reader.models == {}


async def test_lost_records_leave_the_last_value(store: Store, reader: RegistryReader) -> None:
    """Also when the tenants are there again, but not the model registry."""
    with pytest.raises(StoreUnavailable, match="Redis is new, no tenant yet: hearth tenant add"):
        await reader.refresh()
    await RegistryAdmin(store, lambda: 1.0).add("m", "/x")
    await reader.refresh()
    await store.write([("DEL", REGISTRY, REGISTRY_VERSION)])
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="Redis has lost its records"):
            await reader.refresh()
        await store.write([("SET", GENERATION, "new")])
    assert list(reader.models) == ["m"]
    await RegistryAdmin(store, lambda: 2.0).add("n", "/x")
    await reader.refresh()
    assert list(reader.models) == ["n"]


async def test_removing_the_last_model_is_no_loss(
    admin: RegistryAdmin, reader: RegistryReader
) -> None:
    await admin.add("m", "/x")
    await reader.refresh()
    await admin.remove("m")
    await reader.refresh()
    assert reader.models == {}


async def test_oversized_registry_leaves_the_last_value(
    admin: RegistryAdmin, store: Store, reader: RegistryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await admin.add("m", "/x")
    await reader.refresh()
    monkeypatch.setattr("shared.model_registry.reader.MAX_MODELS", 1)
    await admin.add("n", "/x")
    with pytest.raises(StoreRejected, match="has too many models"):
        await reader.refresh()
    assert list(reader.models) == ["m"]


async def test_run_keeps_the_last_value_while_redis_is_away() -> None:
    server, polls = RedisServer(), Polls()
    store = RedisStore(server.url, polls, timeout_s=LIMIT_S)
    admin, reader = RegistryAdmin(store, polls.now), RegistryReader(store, polls)
    await admin.add("m", "/x")
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(reader.run())
        try:
            await polls.wait()
            assert list(reader.models) == ["m"] and logs == []
            server.stop()
            await polls.poll()
            await polls.poll()
            assert list(reader.models) == ["m"] and reader.is_read
            assert [each["event"] for each in logs] == ["catalogue_unavailable"]
            server.start()  # without its records
            await polls.poll()
            assert list(reader.models) == ["m"]
            await admin.add("n", "/x")
            await polls.poll()
            assert list(reader.models) == ["n"] and len(logs) == 1
            assert set(polls.delays) == {POLL_S} and POLL_S <= 1
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await store.close()
            server.stop()
