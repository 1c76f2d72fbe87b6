"""Use and limits of tenants over HTTP, for the operator alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from services.gateway.operator.cluster.tenants import READ_S, TenantUsage
from services.gateway.tenancy.usage_counter import day_of
from shared.clock import MonotonicClock
from shared.fleet.tenant_views import TenantRefusal, TenantSite
from shared.store import RedisStore
from shared.tenancy import audit
from shared.tenancy.tenant import usage_of
from shared.tenancy.tenant_admin import TenantAdmin
from tests.services.gateway.conftest import API_KEY, Cluster
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S

TOKEN = "of-the-operator"
NOW = 1_760_000_000.0


class SetClock(MonotonicClock):
    at = 0.0

    def now(self) -> float:
        return self.at


class Scene:
    """A clock that the test sets, and a Redis of its own, which a test may stop."""

    def __init__(self, redis: RedisServer) -> None:
        self.clock = SetClock()
        self.redis = redis
        self.store = RedisStore(redis.url, MonotonicClock(), timeout_s=LIMIT_S)
        self.admin = TenantAdmin(self.store, lambda: NOW)
        ran = [TenantSite(tenant_id="one", site=site, num_requests=1200) for site in "ab"]
        refused = [TenantRefusal(tenant_id="one", check="decode", region="us", count=2)]
        self.usage = TenantUsage(self.store, self.clock, lambda: NOW, lambda: ran, lambda: refused)

    async def use(self, tenant_id: str, model: str, **counts: int) -> None:
        key = usage_of(tenant_id, day_of(NOW))
        await self.store.write([("HSET", key, f"{k}:{model}", n) for k, n in counts.items()])

    async def rows(self) -> dict[str, Any]:
        found = msgspec.to_builtins(await self.usage.report())
        return {each["tenant_id"]: each for each in found["tenants"]}


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    redis = RedisServer()
    scene = Scene(redis)
    yield scene
    await scene.store.close()
    redis.stop()


async def test_rows_sum_the_models_of_a_day_and_have_the_limits(scene: Scene) -> None:
    await scene.admin.add("one", {"requests_per_min": 60, "concurrency": 2}, "key-1")
    await scene.admin.add("two", {}, "key-2")
    await scene.use("one", "a", requests=2, input_tokens=30, cached_tokens=16, output_tokens=5)
    await scene.use("one", "b", requests=1, input_tokens=10)
    rows = await scene.rows()
    one = rows["one"]
    assert (one["requests"], one["input_tokens"], one["cached_tokens"]) == (3, 40, 16)
    assert (one["output_tokens"], one["sites"]) == (5, "a 1,200, b 1,200")
    assert [(each["name"], each["used"], each["limit"]) for each in one["limits"]] == [
        ("requests_per_min", 0, 60),
        ("concurrency", 0, 2),
    ]
    assert (rows["two"]["requests"], rows["two"]["sites"]) == (0, "")
    assert (one["refused"], rows["two"]["refused"]) == ("decode 2 (us)", "")
    assert rows["two"]["limits"] == []


async def test_redis_is_read_at_most_every_few_seconds(scene: Scene) -> None:
    await scene.admin.add("one", {}, "key-1")
    reports = await asyncio.gather(*(scene.usage.report() for _ in range(20)))
    assert len({id(each) for each in reports}) == 1
    await scene.use("one", "a", requests=2)
    assert (await scene.rows())["one"]["requests"] == 0
    scene.clock.at += READ_S
    assert (await scene.rows())["one"]["requests"] == 2


async def test_without_redis_the_last_rows_are_marked_as_old(scene: Scene) -> None:
    await scene.admin.add("one", {}, "key-1")
    assert (await scene.usage.report()).is_current
    scene.redis.stop()
    scene.clock.at += READ_S
    report = await scene.usage.report()
    assert not report.is_current
    assert [each.tenant_id for each in report.tenants] == ["one"]


async def test_only_the_operator_reads_tenants(cluster: Cluster) -> None:
    async with cluster.beside(operator_token=TOKEN) as beside:
        path = "/v1/cluster/tenants"
        for given in ("", "Bearer x", f"Bearer {API_KEY}"):
            response = await beside.http.get(path, headers={"authorization": given})
            assert response.status_code == 401
            assert "tenant-1" not in response.text
        found = await beside.http.get(path, headers={"authorization": f"Bearer {TOKEN}"})
        assert found.headers["cache-control"] == "no-store"
        assert "tenant-1" in {each["tenant_id"] for each in found.json()["tenants"]}


async def test_operator_reads_deletions_and_refusals(cluster: Cluster) -> None:
    async with cluster.beside(operator_token=TOKEN) as beside:
        store = beside.gateway.tenancy.stores.slow
        headers = {"authorization": f"Bearer {TOKEN}"}
        for kind in audit.AUDIT_KINDS:
            await store.write([audit.line_command("p", "c", "{}", "done", kind)])
        path = "/v1/cluster/audit"
        assert (await beside.http.get(path)).status_code == 401
        found = (await beside.http.get(path, headers=headers)).json()
        assert {each["kind"] for each in found} == {"deletion", "refusal"}
        for count in ("0", "x"):
            refused = await beside.http.get(f"{path}?count={count}", headers=headers)
            assert refused.status_code == 400 and "count" in refused.text
