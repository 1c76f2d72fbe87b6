"""Stored responses: in one Redis, for all gateways, within their bounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from services.gateway.dialects.responses.ids import item_id, response_id
from services.gateway.dialects.responses.storage import references, scripts
from services.gateway.dialects.responses.storage import store as stores
from services.gateway.dialects.responses.storage.completion import BodyCompletion, StoredReferences
from services.gateway.dialects.responses.storage.errors import UnknownResponse
from services.gateway.dialects.responses.storage.record import (
    PREVIOUS,
    ResponseRecord,
    decoded_record,
)
from services.gateway.dialects.responses.storage.references import merged
from services.gateway.dialects.responses.storage.seal import Seal
from services.gateway.dialects.responses.storage.store import ResponseStore
from services.gateway.tenancy.errors import NoRegionAllowed, ZeroRetentionRejected
from shared.clock import MonotonicClock
from shared.errors import InvalidRequest, Overloaded, PayloadTooLarge
from shared.randomness import SystemRandomness
from shared.secrets.secret import Secret
from shared.store import RedisStore, StoreUnavailable
from shared.tenancy.stored_responses import delete_all
from shared.tenancy.tenant import TENANTS, TenantRecord
from shared.tenancy.tenant_admin import TenantAdmin
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.nats_api.test_gateways import second_gateway
from tests.services.gateway.samples import sample_sum
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S, until

TENANT, OTHER = TenantRecord(tenant_id="t1"), TenantRecord(tenant_id="t:1")
ZERO = TenantRecord(tenant_id="t2", is_zero_retention=True)
EUROPEAN = TenantRecord(tenant_id="t3", allowed_regions=("eu",))


class Stored:
    """A store at a time that the test sets, and what it counted."""

    def __init__(self, redis: RedisServer, *, region: str = "", max_bytes: int = 1 << 20) -> None:
        self.now = 1000.0
        self.max_all_bytes = 1 << 20
        self.counts: Counter[str] = Counter()
        self.refused: list[tuple[str, str, str]] = []
        self.redis_url = redis.url
        self.redis = RedisStore(redis.url, MonotonicClock(), timeout_s=LIMIT_S)
        self.store = ResponseStore(
            self.redis,
            MonotonicClock(),
            region=region,
            now=lambda: self.now,
            count=lambda outcome: self.counts.update([outcome]),
            ttl_s=100,
            max_bytes=max_bytes,
            max_all_bytes=lambda: self.max_all_bytes,
            on_refused=lambda *of, **_: self.refused.append((*of[:2], of[2].code)),
        )

    async def save(self, tenant: TenantRecord, *records: ResponseRecord) -> None:
        record = msgspec.json.encode(tenant)
        with contextlib.suppress(StoreUnavailable):
            await self.redis.write([("HSETNX", TENANTS, tenant.tenant_id, record)])
        for each in records:
            self.store.save(tenant, each)
            await asyncio.wait(set(self.store._pending.values()))

    async def is_known(self, tenant: TenantRecord, record: ResponseRecord) -> bool:
        try:
            return await self.read(tenant, record) == record
        except UnknownResponse:
            return False

    async def read(self, tenant: TenantRecord, record: ResponseRecord) -> ResponseRecord:
        return await self.store.get(tenant, record.id, lambda _: None)

    async def close(self) -> None:
        await self.store.stop()
        await self.redis.evaluate("return redis.call('FLUSHALL')", [], [])
        await self.redis.close()


@pytest_asyncio.fixture
async def stored(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stored]:
    monkeypatch.setattr(stores, "READ_AGAIN_S", 0.0)
    made = Stored(redis_server, region="mars", max_bytes=3000)
    yield made
    await made.close()


async def completed(
    completion: BodyCompletion, tenant: TenantRecord, data: bytes, hold: Any = lambda _: None
) -> bytes:
    """A small body with what it refers to."""

    async def scan(_: str) -> bytes | None:
        return None

    referred = await completion.referred(tenant, data, scan)
    return data if referred is None else merged(data, await referred.read(hold))


def record_of(name: str, previous: str = "", *, size: int = 500) -> ResponseRecord:
    body = {"id": response_id(name), "output": [{"id": name, "text": "x" * size}]}
    return ResponseRecord(
        id=response_id(name), previous=previous, response=msgspec.json.encode(body)
    )


async def test_record_belongs_to_its_tenant(stored: Stored) -> None:
    record = record_of("a")
    await stored.save(TENANT, record)
    assert await stored.is_known(TENANT, record)
    assert not await stored.is_known(OTHER, record)
    with pytest.raises(UnknownResponse) as foreign:
        await stored.read(OTHER, record)
    with pytest.raises(UnknownResponse) as unknown:
        await stored.read(OTHER, record_of("none"))
    assert foreign.value.message == unknown.value.message
    with pytest.raises(UnknownResponse):
        await stored.store.delete(OTHER, record.id)
    await stored.store.delete(TENANT, record.id)
    assert not await stored.is_known(TENANT, record)


async def test_least_recently_used_makes_room(stored: Stored) -> None:
    first, second, third = (record_of(each, size=1000) for each in "abc")
    for each in (first, second):
        stored.now += 1
        await stored.save(TENANT, each)
    stored.now += 1
    assert await stored.is_known(TENANT, first)
    await stored.save(TENANT, third)
    known = [await stored.is_known(TENANT, each) for each in (first, second, third)]
    assert known == [True, False, True]
    assert stored.counts == {"stored": 3, "evicted": 1}


def names(tenant: TenantRecord, count: int) -> list[ResponseRecord]:
    return [record_of(f"{tenant.tenant_id}-{number}", size=1000) for number in range(count)]


async def held(stored: Stored) -> int:
    """Bytes of all tenants; Redis holds what the sets of all tenants say."""
    found: dict[str, float] = dict(
        await stored.redis._redis.zrange("hearth:responses:held", 0, -1, withscores=True)
    )
    assert {bytes(each) for each in found} == {
        bytes(each) for each in await stored.redis._redis.zrange("hearth:responses:ends", 0, -1)
    }
    total = int(await stored.redis.get("hearth:responses:total") or 0)
    assert sum(found.values()) == total
    return total


async def test_tenant_that_holds_most_makes_room_for_all(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "READ_AGAIN_S", 0.0)
    stored = Stored(redis_server)
    small, *large = (TenantRecord(tenant_id=each) for each in ("small", "one", "two", "tw:o"))
    first, *others = names(small, 4)
    await stored.save(small, first)
    one = await held(stored)
    stored.max_all_bytes = 12 * one + 100
    for records in zip(*(names(each, 20) for each in large), strict=True):
        for tenant, record in zip(large, records, strict=True):
            stored.now += 1
            await stored.save(tenant, record)
            assert await held(stored) <= stored.max_all_bytes
    for tenant in large:
        known = [await stored.is_known(tenant, each) for each in names(tenant, 20)]
        assert known == sorted(known) and 3 <= sum(known) <= 4
    assert await stored.is_known(small, first)
    assert stored.counts == {"stored": 61, "evicted": 49}
    with pytest.raises(UnknownResponse) as evicted:
        await stored.store.chain(large[0], names(large[0], 1)[0].id)
    assert evicted.value.http_status == 404
    await stored.save(small, *others)
    assert [await stored.is_known(small, each) for each in (first, *others)] == [True] * 4
    assert await held(stored) <= stored.max_all_bytes
    for tenant in (small, *large):
        await delete_all(stored.redis, tenant.tenant_id)
    assert await held(stored) == 0
    await stored.close()


async def test_smaller_bound_removes_in_steps(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis that is given less memory is not kept busy by one write that makes all the room."""
    monkeypatch.setattr(scripts, "SAVE", scripts.SAVE.replace("256", "4"))
    stored = Stored(redis_server)
    records = names(TENANT, 12)
    await stored.save(TENANT, *records)
    stored.max_all_bytes = await held(stored) // 12 + 100
    last = record_of("last", size=1000)
    await stored.save(OTHER, last)
    assert stored.counts == {"stored": 13, "evicted": 12}
    assert await stored.is_known(OTHER, last) and await held(stored) <= stored.max_all_bytes
    stored.max_all_bytes = 1000
    await stored.save(OTHER, record_of("larger", size=1000))
    assert stored.counts["too_large"] == 1 and await stored.is_known(OTHER, last)
    await stored.close()


async def test_records_that_ended_hold_no_room(redis_server: RedisServer) -> None:
    """Of a tenant that stores nothing any more, too: its keys are gone by then."""
    stored = Stored(redis_server)
    await stored.save(TENANT, *names(TENANT, 3))
    start, *own = stores.response_keys("t1")
    await stored.redis._redis.delete(*own[:3], *(start + each.id for each in names(TENANT, 3)))
    stored.now += 101
    await stored.save(OTHER, record_of("b", size=1000))
    assert await stored.redis._redis.zcard("hearth:responses:held") == 1
    await held(stored)
    await stored.close()


async def test_expired_records_free_their_room(stored: Stored) -> None:
    await stored.save(TENANT, record_of("a", size=2000))
    stored.now += 101
    await stored.save(TENANT, record_of("b", size=2000))
    assert stored.counts == {"stored": 2}


async def test_record_lives_as_long_as_it_should(stored: Stored) -> None:
    await stored.save(TENANT, record_of("a"))
    key = stores.response_keys("t1")[0] + response_id("a")
    assert 0 < await stored.redis.evaluate("return redis.call('TTL', KEYS[1])", [key], []) <= 100


async def test_large_record_is_counted(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_RECORD_BYTES", 400)
    stored.store.save(TENANT, record_of("a"))
    assert stored.counts == {"too_large": 1}


async def test_chain_is_bounded(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = record_of("a"), record_of("b", response_id("a"))
    await stored.save(TENANT, first, second)
    chain = await stored.store.chain(TENANT, second.id)
    found = await stored.store.read(TENANT, chain, PREVIOUS)
    assert [decoded_record(each, PREVIOUS) for each in found] == [first, second]
    monkeypatch.setattr(stores, "MAX_CHAIN", 1)
    with pytest.raises(PayloadTooLarge):
        await stored.store.chain(TENANT, second.id)
    monkeypatch.undo()
    await stored.store.delete(TENANT, first.id)
    with pytest.raises(UnknownResponse):
        await stored.store.read(TENANT, chain, PREVIOUS)
    with pytest.raises(UnknownResponse):
        await stored.store.chain(TENANT, second.id)


def test_unreadable_records_are_unknown() -> None:
    for data in (b"\x81\xa1x" + b"\x91" * 100_000, b"\x81\xa2id\xa1\xff", b"\x80", b""):
        with pytest.raises(UnknownResponse):
            decoded_record(data, "p")


def test_sealed_texts_count_in_bytes(stored: Stored) -> None:
    found = StoredReferences(stored.store, TENANT, (), (), {"sealed": "日本"}, 10)
    assert found.num_bytes == 6


async def test_state_is_counted_before_it_is_read(stored: Stored) -> None:
    await stored.save(TENANT, record_of("a"), record_of("b", response_id("a")))
    reads: list[str] = []
    evaluate = stored.redis.evaluate

    async def count(script: str, *arguments: Any) -> Any:
        reads.append(script)
        return await evaluate(script, *arguments)

    stored.redis.evaluate = count  # type: ignore[method-assign]

    def hold(num_bytes: int) -> None:
        assert num_bytes > 1000 and scripts.READ not in reads
        raise Overloaded("this tenant's requests hold too many body bytes")

    body = msgspec.json.encode({"input": "x", "previous_response_id": response_id("b")})
    with pytest.raises(Overloaded):
        await completed(BodyCompletion(stored.store, None), TENANT, body, hold)
    with pytest.raises(PayloadTooLarge, match="larger than 1000 bytes"):
        await completed(BodyCompletion(stored.store, None, 1000), TENANT, body, hold)
    with pytest.raises(Overloaded):
        await stored.store.get(TENANT, response_id("b"), lambda _: hold(1001))
    assert scripts.READ not in reads


async def test_records_are_read_in_parts(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large reply would keep Redis, and one that is late opens the breaker of its connection."""
    names = "abcd"
    for previous, name in zip(["", *names], names, strict=False):
        await stored.save(TENANT, record_of(name, previous and response_id(previous)))
    chain = await stored.store.chain(TENANT, response_id("d"))
    monkeypatch.setattr(stores, "MAX_PART_BYTES", 2 * chain[0].num_bytes + 100)
    bulk = RedisStore(stored.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    stored.store._bulk = bulk
    sizes: list[int] = []
    evaluate = bulk.evaluate

    async def count(script: str, keys: Any, arguments: Any) -> Any:
        sizes.append(len(arguments) - 1)
        return await evaluate(script, keys, arguments)

    bulk.evaluate = count  # type: ignore[method-assign]
    assert len(await stored.store.read(TENANT, chain, PREVIOUS)) == 4
    assert sizes == [2, 2]
    await bulk.close()


async def test_read_waits_for_the_write_of_its_gateway(stored: Stored) -> None:
    record = record_of("a")
    await stored.save(TENANT)  # its record alone
    stored.store.save(TENANT, record)
    assert await stored.read(TENANT, record) == record


async def test_some_tenants_store_nothing(redis_server: RedisServer) -> None:
    stored = Stored(redis_server, region="us")
    completion = BodyCompletion(stored.store, None)
    for tenant, error in ((ZERO, ZeroRetentionRejected), (EUROPEAN, NoRegionAllowed)):
        assert completion.of_tenant(tenant).save is None
        for body in (b'{"store":true}', b'{"previous_response_id":"resp_1"}'):
            with pytest.raises(error):
                await completed(completion, tenant, body)
        assert await completed(completion, tenant, b'{"input":"x"}') == b'{"input":"x"}'
    await stored.close()
    stored = Stored(redis_server, region="eu")
    assert BodyCompletion(stored.store, None).of_tenant(EUROPEAN).save is not None
    await stored.close()


@pytest.mark.parametrize(
    "change",
    [
        {"is_zero_retention": True},
        {"allowed_regions": ["eu"]},
        {"allowed_regions": []},
        {"region_class": "eu"},
        None,
    ],
)
async def test_response_that_ends_after_a_change_is_not_stored(
    stored: Stored, change: dict[str, Any] | None
) -> None:
    admin = TenantAdmin(stored.redis, lambda: 0.0)
    tenant = await admin.add("changed", {}, "key")
    if change is None or "region_class" in change:
        data = b"[" if change is None else msgspec.json.encode({"tenant_id": "changed", **change})
        await stored.redis.write([("HSET", TENANTS, "changed", data)])
    else:
        await admin.change("changed", change)
    record = record_of("a")
    await stored.save(tenant, record)
    assert stored.counts == {"forbidden": 1} and not await stored.is_known(tenant, record)
    assert stored.refused == [("changed", "a response", "permission_denied")]
    if change is not None:
        unbound = {"is_zero_retention": False, "allowed_regions": None, "region_class": ""}
        await admin.change("changed", unbound)
        await stored.save(tenant, record)
        assert await stored.is_known(tenant, record)
        await admin.change("changed", {"allowed_regions": ["mars"]})
        await stored.save(tenant, record)
        assert await stored.is_known(tenant, record)


async def test_repeated_change_of_regions_deletes_again(stored: Stored) -> None:
    """As after one whose deletion failed."""
    admin, record = TenantAdmin(stored.redis, lambda: 0.0), record_of("a")
    tenant = await admin.add("changed", {"allowed_regions": ["mars"]}, "key")
    await stored.save(tenant, record)
    await admin.change("changed", {"weight": 2.0})
    assert await stored.is_known(tenant, record)
    await admin.change("changed", {"allowed_regions": ["mars"]})
    assert not await stored.is_known(tenant, record)


async def test_sealed_reasoning_opens_for_its_tenant(stored: Stored) -> None:
    seal = Seal(Secret("secret"), SystemRandomness().bytes)
    completion = BodyCompletion(stored.store, seal)
    sealed = seal.seal("t1", "hm")
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    body = msgspec.json.encode({"input": [item, {"role": "user", "content": "x"}]})
    for tenant, content in ((TENANT, [{"type": "reasoning_text", "text": "hm"}]), (OTHER, None)):
        found = msgspec.json.decode(await completed(completion, tenant, body))
        assert found["input"][0].get("content") == content
    assert seal.open("t1", sealed[:-3] + "AAA") is None


def test_sealed_reasoning_opens_through_a_rotation() -> None:
    before, added, used, after = (
        Seal(Secret(text), SystemRandomness().bytes)
        for text in ("old", "old\nnew", "new\nold", "new")
    )
    steps = (before, added, used, after)
    for one, other in pairwise(steps):
        for writer, reader in ((one, other), (other, one)):
            assert reader.open("t1", writer.seal("t1", "hm")) == "hm"
    assert after.open("t1", before.seal("t1", "hm")) is None


async def test_text_that_looks_like_a_reference_keeps_its_history(stored: Stored) -> None:
    await stored.save(TENANT, record_of("a"))
    body = {"input": "an item_reference", "previous_response_id": response_id("a")}
    found = await completed(BodyCompletion(stored.store, None), TENANT, msgspec.json.encode(body))
    assert msgspec.json.decode(found)["hearth_history"][0]["id"] == "a"


async def completed_size(stored: Stored, num_references: int, max_bytes: int) -> int:
    reference = {"type": "item_reference", "id": item_id("msg", response_id("a"), 0)}
    body = {"input": [reference] * num_references}
    completion = BodyCompletion(stored.store, None, max_bytes)
    return len(await completed(completion, TENANT, msgspec.json.encode(body)))


async def test_references_pull_in_no_more_than_a_body(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of many short references puts in the whole item, from a record that is decoded once."""
    output = [{"id": item_id("msg", response_id("a"), 0), "text": "x" * 500}]
    response = msgspec.json.encode({"id": response_id("a"), "output": output})
    await stored.save(TENANT, ResponseRecord(id=response_id("a"), response=response))
    decoded: list[object] = []
    items_of = references.named_items_of

    def count(record: ResponseRecord) -> object:
        decoded.append(record)
        return items_of(record)

    monkeypatch.setattr(references, "named_items_of", count)
    assert 0 < await completed_size(stored, 50, max_bytes=1 << 20) < 1 << 20
    assert len(decoded) == 1
    with pytest.raises(PayloadTooLarge, match="more than 10000 bytes"):
        await completed_size(stored, 50, max_bytes=10_000)


def test_values_beside_a_reference_are_not_decoded() -> None:
    """A text that looks like a reference would else cost a hundred times the time of its bytes."""
    item = {"type": "item_reference", "id": "msg_1", "text": "hearth1."}
    deep = b'"deep":' + b"[" * 200 + b"]" * 200
    body = b'{"input":[' + msgspec.json.encode(item)[:-1] + b"," + deep + b"}]}"
    assert references.references_of(body).items == {0: "msg_1"}
    found = references.references_of(
        msgspec.json.encode({"input": [{"role": "user", "content": "an item_reference hearth1."}]})
    )
    assert found == references.References()


async def test_references_are_counted_before_any_is_read(stored: Stored) -> None:
    with pytest.raises(PayloadTooLarge, match="4096"):
        await completed_size(stored, 4097, max_bytes=1 << 30)


async def test_away_redis(redis_server: RedisServer) -> None:
    server = RedisServer()
    stored = Stored(server)
    completion = BodyCompletion(stored.store, None)
    server.stop()
    for body in (b'{"store":true}', b'{"previous_response_id":"resp_1"}'):
        with pytest.raises(StoreUnavailable):
            await completed(completion, TENANT, body)
    assert await completed(completion, TENANT, b'{"input":"x"}') == b'{"input":"x"}'
    await stored.save(TENANT, record_of("a"))
    assert stored.counts == {"failed": 1}
    await stored.store.stop()
    await stored.redis.close()


async def test_other_gateway_goes_on(cluster: Cluster) -> None:
    first = await cluster.openai.responses.create(model="tiny", input="hi")
    async with second_gateway(cluster) as other:
        client = cluster.openai.with_options(base_url=f"{other.http_address}/v1")
        assert (await client.responses.retrieve(first.id)).id == first.id
        second = await client.responses.create(
            model="tiny", input="on", previous_response_id=first.id
        )
    third = await cluster.openai.responses.create(
        model="tiny", input="on", previous_response_id=second.id
    )
    assert third.usage is not None and second.usage is not None and first.usage is not None
    lengths = [each.usage.input_tokens for each in (first, second, third) if each.usage]
    assert lengths == sorted(set(lengths))
    count = "hearth_stored_responses_total"
    await until(lambda: sample_sum(cluster.gateway, count, outcome="stored") >= 2)


async def test_another_tenant_gets_the_same_404(cluster: Cluster) -> None:
    first = await cluster.openai.responses.create(model="tiny", input="hi")
    config = cluster.gateway._config
    store = RedisStore(config.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    await TenantAdmin(store, lambda: 0.0).add("tenant-2", {}, "key-of-tenant-2")
    await store.close()
    headers = {"authorization": "Bearer key-of-tenant-2"}
    answers: list[Any] = []
    for each in (first.id, response_id("none")):
        body = {"input": "x", "previous_response_id": each}
        response = await cluster.http.post("/v1/responses", json=body, headers=headers)
        answers.append((response.status_code, response.json()))
    assert answers[0] == answers[1] and answers[0][0] == 404


async def test_name_that_is_no_text_is_refused(stored: Stored) -> None:
    body = b'{"input":[{"type":"item_reference","id":"msg_1"}],"\xf0a":1}'
    with pytest.raises(InvalidRequest):
        await completed(BodyCompletion(stored.store, None), TENANT, body)
