"""Limits, permissions and usage of a tenant over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from services.gateway.tenancy.api_keys import REFRESH_S, ApiKeys
from services.gateway.tenancy.region_rule import RegionRule
from services.gateway.tenancy.stores import GatewayStores
from services.gateway.tenancy.usage_counter import day_of
from shared.clock import MonotonicClock
from shared.errors import Overloaded
from shared.messages import Request
from shared.regions.region_classes import region_classes
from shared.store import RedisStore
from shared.tenancy.refusals import Refusals
from shared.tenancy.tenant import TENANTS, TenantRecord, UsageRow
from shared.tenancy.tenant_admin import TenantAdmin
from tests.services.gateway.conftest import Cluster, http_client, place_in_region
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT
from tests.services.gateway.dialects.openai.test_refusals import check_envelope
from tests.services.gateway.peer import PeerDecode, Run
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S, until

KEY = "key-of-acme"
EMBEDDINGS, COMPLETIONS = "/v1/embeddings", "/v1/completions"


class Acme:
    """A tenant, and an HTTP client with its API key."""

    def __init__(self, store: RedisStore, http: httpx.AsyncClient, cluster: Cluster) -> None:
        self.store = store
        self.http = http
        self.cluster = cluster
        self.admin = TenantAdmin(store, lambda: 1.7e9)

    async def configure(self, **changes: Any) -> None:
        """Replaces the tenant's record by one with `changes`, and clears all counters."""
        assert await self.cluster.gateway._usage.flush()
        await self.store.write([("FLUSHALL",)])
        self.cluster.gateway._limits._accounts.clear()
        await self.admin.add("acme", changes, KEY)
        self.cluster.gateway.api_keys._known.clear()
        self.cluster.gateway._driver._streams._changed_regions.clear()

    async def post_chat(self, **fields: Any) -> httpx.Response:
        return await self.http.post(CHAT, json={**BODY, **fields})

    async def leave_after(self, num_tokens: int) -> None:
        """The client of a stream disconnects once the gateway has these tokens, and no more."""
        self.cluster.decodes[0].hold_at = num_tokens
        open_streams = self.cluster.gateway._driver._streams._by_request
        await until(lambda: not open_streams)
        streaming = asyncio.create_task(self.post_chat(stream=True))
        await until(
            lambda: (
                [len(each.choices[0].token_ids) for each in open_streams.values()] == [num_tokens]
            )
        )
        streaming.cancel()
        await asyncio.wait({streaming})

    async def request(self) -> Request:
        return (await self.cluster.scheduler.submits.get()).request

    async def num_open(self) -> int:
        return (await self.admin.state(await self.admin.one("acme"))).num_open

    async def usage(self) -> list[UsageRow]:
        assert await self.cluster.gateway._usage.flush()
        return await self.admin.usage(["acme"], [day_of(time.time())])


@pytest_asyncio.fixture(loop_scope="session")
async def acme(cluster: Cluster, redis_server: RedisServer) -> AsyncIterator[Acme]:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    gateway = cluster.gateway
    with pytest.MonkeyPatch.context() as patch:
        # 2 s, not 50 ms: a busy machine makes Redis look unavailable
        patch.setattr(gateway.api_keys, "_stores", (store,))
        for each in (gateway._limits, gateway._usage):
            patch.setattr(each, "_store", store)
        async with http_client(gateway, KEY) as http:
            yield Acme(store, http, cluster)
        await until(lambda: not len(gateway._driver))
        assert await gateway._limits.flush()
    await store.close()


async def test_ratelimit_headers_are_in_every_response(acme: Acme) -> None:
    """A request of the six comes back after ten seconds, so a slow answer changes no number."""
    await acme.configure(requests_per_min=6, output_tokens_per_min=6000)
    for stream in (False, True):
        response = await acme.post_chat(stream=stream, max_tokens=20)
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "6"
        assert int(response.headers["x-ratelimit-remaining-requests"]) == 5 - stream
        assert response.headers["x-ratelimit-reset-requests"].endswith("s")
        assert response.headers["x-ratelimit-limit-tokens"] == "6000"
        assert int(response.headers["x-ratelimit-remaining-tokens"]) > 5900
    acme.cluster.scheduler.refusal = Overloaded("full")
    rejected = await acme.post_chat()
    check_envelope(rejected, 429, "overloaded", None)
    assert rejected.headers["x-ratelimit-limit-requests"] == "6"
    await acme.configure()
    acme.cluster.scheduler.refusal = None
    assert not [name for name in (await acme.post_chat()).headers if name.startswith("x-ratelimit")]


async def test_too_many_requests_are_429_with_retry_after(acme: Acme) -> None:
    await acme.configure(requests_per_min=2)
    for _ in range(2):
        assert (await acme.post_chat()).status_code == 200
    for _ in range(2):  # the second is rejected without a Redis call
        response = await acme.post_chat()
        check_envelope(response, 429, "requests_per_min_exceeded", None)
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert 25 <= int(response.headers["retry-after"]) <= 30
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert acme.cluster.scheduler.submits.qsize() == 2
    assert (await acme.http.get("/v1/models")).status_code == 200


async def test_request_that_was_not_opened_frees_its_place(
    acme: Acme, monkeypatch: pytest.MonkeyPatch
) -> None:
    await acme.configure(concurrency=1)
    submission = acme.cluster.gateway.submission

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("not opened")

    with monkeypatch.context() as patched:
        patched.setattr(submission._driver, "open", fail)
        assert (await acme.post_chat()).status_code == 500
    await until(lambda: not submission._reservations)
    assert (await acme.post_chat()).status_code == 200


async def test_request_over_a_limit_has_a_timeline(acme: Acme) -> None:
    await acme.configure(requests_per_min=1)
    responses = [await acme.post_chat() for _ in range(2)]
    path = f"/v1/requests/{responses[1].headers['x-request-id']}/timeline"
    timeline = (await acme.http.get(path)).raise_for_status().json()
    assert (timeline["status"], timeline["outcome"]) == (429, "requests_per_min_exceeded")
    assert timeline["tenant_id"] == "acme"
    assert [phase["name"] for phase in timeline["gateway_phases"]] == ["validate"]
    response = await acme.http.post(CHAT, json=BODY, headers={"authorization": "Bearer none"})
    assert response.status_code == 401
    assert acme.cluster.gateway.telemetry.find(response.headers["x-request-id"]) is None


@pytest.mark.parametrize("name", ["requests_per_min", "concurrency", "kv_quota_tokens"])
async def test_limit_of_zero_is_403(acme: Acme, name: str) -> None:
    await acme.configure(**{name: 0})
    response = await acme.post_chat()
    check_envelope(response, 403, "limit_is_zero", None)
    assert name in response.json()["error"]["message"]
    assert "retry-after" not in response.headers
    assert acme.cluster.scheduler.submits.empty()


async def test_oversized_request_is_400(acme: Acme) -> None:
    await acme.configure(output_tokens_per_min=30, input_tokens_per_min=90)
    check_envelope(await acme.post_chat(max_tokens=31), 400, "exceeds_limit", "max_tokens")
    check_envelope(await acme.post_chat(max_tokens=11, n=3), 400, "exceeds_limit", "max_tokens")
    long = {"messages": [{"role": "user", "content": "x y " * 60}]}
    check_envelope(await acme.post_chat(max_tokens=5, **long), 400, "exceeds_limit", "messages")
    response = await acme.post_chat(n=3)  # the default max_tokens is lowered to the limit
    assert response.status_code == 200
    assert (await acme.request()).sampling.max_tokens == 10


async def test_reservation_ends_once_for_every_outcome(acme: Acme) -> None:
    await acme.configure(concurrency=1)
    decode, scheduler = acme.cluster.decodes[0], acme.cluster.scheduler
    for _ in range(3):  # sequential requests never exceed the limit
        assert (await acme.post_chat(stream=True)).status_code == 200
        assert (await acme.post_chat()).status_code == 200
    scheduler.refusal = Overloaded("full")
    check_envelope(await acme.post_chat(), 429, "overloaded", None)
    scheduler.refusal = None
    bad = await acme.post_chat(max_tokens=0)
    check_envelope(bad, 400, "invalid_request", "max_tokens")
    await acme.leave_after(3)
    await until(lambda: acme.cluster.gateway._limits.num_open == 0)
    running = asyncio.create_task(acme.post_chat())
    await until(lambda: acme.cluster.gateway._limits.num_open == 1)
    check_envelope(await acme.post_chat(), 429, "concurrency_exceeded", None)
    decode.released.set()
    assert (await running).status_code == 200
    assert (await acme.post_chat()).status_code == 200
    await until(lambda: not acme.cluster.gateway._limits.num_unsettled)
    assert await acme.num_open() == 0


async def test_several_prompts_share_one_reservation(acme: Acme) -> None:
    await acme.configure(concurrency=1, requests_per_min=5)
    body = {"model": "tiny", "prompt": ["a b", "c", "d e f"], "max_tokens": 5}
    response = await acme.http.post(COMPLETIONS, json=body)
    assert response.status_code == 200
    assert response.headers["x-ratelimit-remaining-requests"] == "4"
    usage = response.json()["usage"]
    (row,) = await acme.usage()
    assert (row.requests, row.input_tokens) == (1, usage["prompt_tokens"])
    assert row.output_tokens == usage["completion_tokens"]
    assert row.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]


async def test_only_delivered_output_tokens_are_charged(acme: Acme) -> None:
    await acme.configure(output_tokens_per_min=500)
    for _ in range(4):
        response = await acme.post_chat(max_tokens=400)
        assert response.status_code == 200, response.text
    await until(lambda: not acme.cluster.gateway._limits.num_unsettled)
    current = await acme.admin.state(await acme.admin.one("acme"))
    num_output_tokens = response.json()["usage"]["completion_tokens"]
    assert 0 < current.used["output_tokens_per_min"] <= 4 * num_output_tokens
    decode = acme.cluster.decodes[0]
    decode.hold_at = 0
    both = [asyncio.create_task(acme.post_chat(max_tokens=300)) for _ in range(2)]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    decode.released.set()
    first, second = await asyncio.gather(*both)
    assert {first.status_code, second.status_code} == {200, 429}
    rejected = first if first.status_code == 429 else second
    check_envelope(rejected, 429, "output_tokens_per_min_exceeded", None)


async def test_usage_counts_delivered_tokens_once(acme: Acme) -> None:
    await acme.configure()
    reported = [(await acme.post_chat()).json()["usage"] for _ in range(3)]
    short = (await acme.post_chat(max_tokens=3)).json()["usage"]
    # a worker dies during the response: the request is resubmitted
    first = acme.cluster.decodes[0]
    first.hold_at = 4
    running = asyncio.create_task(acme.post_chat())
    await until(lambda: any(len(run.token_ids) == 4 for run in open_runs(first)))
    await first.die()
    resumed = (await running).json()
    assert resumed["hearth"]["num_resubmissions"] >= 1
    acme.cluster.scheduler.refusal = Overloaded("full")
    assert (await acme.post_chat()).status_code == 429  # delivers nothing, so counts nothing
    (row,) = await acme.usage()
    all_reported = [*reported, short, resumed["usage"]]
    assert row.requests == len(all_reported)
    assert row.input_tokens == sum(each["prompt_tokens"] for each in all_reported)
    assert row.output_tokens == sum(each["completion_tokens"] for each in all_reported)
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in all_reported]
    assert row.cached_tokens == sum(cached)
    assert row.model == "tiny"


def open_runs(decode: PeerDecode) -> list[Run]:
    return [run for runs in decode.runs.values() for run in runs.values() if run.finish is None]


async def test_usage_counts_tokens_of_disconnected_client(acme: Acme) -> None:
    await acme.configure()
    await acme.leave_after(3)
    await until(lambda: not len(acme.cluster.gateway._driver))
    (row,) = await acme.usage()
    assert (row.requests, row.output_tokens) == (1, 3)


async def test_embeddings_use_no_output_tokens(acme: Acme) -> None:
    await acme.configure(output_tokens_per_min=1)
    body = {"model": "tiny", "input": ["a", "b"]}
    for _ in range(3):
        assert (await acme.http.post(EMBEDDINGS, json=body)).status_code == 200
    (row,) = await acme.usage()
    assert (row.requests, row.output_tokens) == (3, 0)
    assert row.input_tokens > 0


async def test_only_allowed_models_are_served(acme: Acme) -> None:
    await acme.configure(allowed_models=("other",))
    assert (await acme.http.get("/v1/models")).json()["data"] == []
    check_envelope(await acme.http.get("/v1/models/tiny"), 403, "model_not_allowed", "model")
    check_envelope(await acme.http.get("/v1/models/huge"), 404, "model_not_found", "model")
    for body in ({**BODY}, {key: each for key, each in BODY.items() if key != "model"}):
        response = await acme.http.post(CHAT, json=body)
        check_envelope(response, 403, "model_not_allowed", "model")
    check_envelope(await acme.post_chat(model="huge"), 404, "model_not_found", "model")
    await acme.configure(allowed_models=("tiny", "other"))
    assert [each["id"] for each in (await acme.http.get("/v1/models")).json()["data"]] == ["tiny"]
    assert (await acme.post_chat()).status_code == 200


async def test_request_carries_settings_of_its_tenant(
    acme: Acme, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = acme.cluster.gateway
    place_in_region(monkeypatch, gateway, RegionRule("ch"))
    monkeypatch.setattr(gateway._health_monitor.refusals, "region", "ch")
    monkeypatch.setattr(gateway._driver, "_schedulers_for", lambda _: ["scheduler-1"])
    await acme.configure(
        allowed_regions=("eu", "ch"),
        kv_quota_tokens=4096,
        weight=2.5,
        priority=2,
        is_zero_retention=True,
    )
    for requested, priority in ((None, 2), (0, 0), (-3, -3), (9, 2)):
        assert (await acme.post_chat(priority=requested)).status_code == 200
        request = await acme.request()
        assert request.priority == priority
    assert request.allowed_regions == ("eu", "ch")
    assert (request.kv_quota_tokens, request.weight) == (4096, 2.5)
    assert request.is_zero_retention
    await acme.configure()
    assert (await acme.post_chat(priority=1)).status_code == 200
    request = await acme.request()
    assert (request.allowed_regions, request.kv_quota_tokens, request.priority) == ((), 0, 0)
    assert (request.weight, request.is_zero_retention) == (1.0, False)


async def test_empty_region_list_allows_no_region(acme: Acme) -> None:
    await acme.configure(allowed_regions=())
    check_envelope(await acme.post_chat(), 403, "no_region_allowed", None)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"allowed_regions": ("us",)}, "data of this tenant may be in us alone"),
        ({"region_class": "eu"}, "data of this tenant may be in de alone"),
        ({"region_class": "eu", "allowed_regions": ("us",)}, "may be in no region alone"),
        ({"region_class": "mars"}, "class 'mars' of this tenant is not declared here"),
    ],
)
async def test_gateway_of_another_region_reads_no_body(
    acme: Acme, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], reason: str
) -> None:
    """The bodies are no JSON, which nobody finds out."""
    await acme.configure()
    record = TenantRecord(tenant_id="acme", **limits)
    await acme.store.write([("HSET", TENANTS, "acme", msgspec.json.encode(record))])
    refusals = Refusals("fr")
    rule = RegionRule("fr", region_classes(["eu=de"]), refusals)
    monkeypatch.setattr(acme.cluster.gateway.api_keys, "_rule", rule)
    acme.cluster.gateway.api_keys._known.clear()
    paths = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
    for path in paths:
        response = await acme.http.post(path, content=b"{")
        assert response.status_code == 403 and reason in response.text, (path, response.text)
    assert refusals.totals == {"gateway": len(paths)}


async def test_no_body_field_changes_the_tenant(acme: Acme) -> None:
    await acme.configure(priority=-1)
    fields = {"tenant_id": "other", "weight": 99, "allowed_regions": [], "kv_quota_tokens": 1}
    assert (await acme.post_chat(**fields)).status_code == 200
    request = await acme.request()
    assert (request.tenant_id, request.weight, request.priority) == ("acme", 1.0, -1)


async def test_unknown_tenant_is_403_and_broken_record_503(acme: Acme) -> None:
    await acme.configure()
    await acme.store.write([("HDEL", TENANTS, "acme")])
    check_envelope(await acme.post_chat(), 403, "unknown_tenant", None)
    await acme.store.write([("HSET", TENANTS, "acme", "{")])
    check_envelope(await acme.post_chat(), 503, "dependency_unavailable", None)


async def test_usage_of_a_running_stream_is_counted_before_its_end(acme: Acme) -> None:
    """A gateway that is killed then loses the usage of the last seconds only."""
    await acme.configure()
    for each in acme.cluster.decodes:
        each.hold_at = 5
    stream = asyncio.create_task(acme.post_chat(stream=True))
    async with asyncio.timeout(LIMIT_S):
        while (await _counted(acme)).output_tokens < 5:
            await asyncio.sleep(0.01)
    running = await _counted(acme)
    assert (running.requests, running.output_tokens, running.cached_tokens) == (1, 5, 0)
    assert running.input_tokens > 0
    for each in acme.cluster.decodes:
        each.released.set()
    assert (await stream).status_code == 200
    ended = await _counted(acme)
    assert (ended.requests, ended.cached_tokens) == (1, 4)
    assert ended.input_tokens == running.input_tokens
    assert ended.output_tokens == len(acme.cluster.answer)


async def _counted(acme: Acme) -> UsageRow:
    acme.cluster.gateway.submission.count_usage()
    return (await acme.usage() or [UsageRow(tenant_id="acme", day="", model="")])[0]


async def test_emptied_redis_makes_no_key_invalid(acme: Acme) -> None:
    """A known key is served by its last record, any other gets 503, and /ready shows it."""
    await acme.configure(requests_per_min=60)
    assert (await acme.post_chat()).status_code == 200
    await acme.store.write([("FLUSHALL",)])
    keys = acme.cluster.gateway.api_keys
    await until(lambda: _is_outdated(keys))
    response = await acme.post_chat()
    assert response.status_code == 200
    assert response.headers["x-ratelimit-limit-requests"] == "60"
    unknown = await acme.http.post(CHAT, json=BODY, headers={"authorization": "Bearer unknown"})
    check_envelope(unknown, 503, "dependency_unavailable", None)
    ready = await acme.http.get("/ready")
    assert (ready.status_code, ready.json()["redis"]) == (200, "empty")
    await acme.admin.add("acme", {}, KEY)
    await until(lambda: _is_outdated(keys))
    unknown = await acme.http.post(CHAT, json=BODY, headers={"authorization": "Bearer unknown"})
    check_envelope(unknown, 401, "invalid_api_key", None)


async def test_redis_without_replicas_is_shown_as_one_that_rejects_writes(
    acme: Acme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known keys are served; /ready and the operator's view show why limits are a gateway's own."""
    await acme.configure(requests_per_min=60)
    gateway, redis = acme.cluster.gateway, acme.store._redis
    monkeypatch.setattr(gateway.tenancy, "stores", GatewayStores.of_one(acme.store))
    servers = gateway._operator.servers
    await redis.config_set("min-replicas-to-write", 1)
    try:
        response = await acme.post_chat()
        ready = (await acme.http.get("/ready")).json()
        await servers.poll()
    finally:
        await redis.config_set("min-replicas-to-write", 0)
    assert response.status_code == 200
    assert response.headers["x-ratelimit-limit-requests"] == "60"
    assert (ready["ready"], ready["redis"]) == (True, "rejects writes")
    assert servers.redis.state == "rejects writes"


def _is_outdated(keys: ApiKeys) -> bool:
    """Whether the next use of each known key looks it up."""
    now = keys._clock.now()
    return all(now - each.checked_at >= REFRESH_S for each in keys._known.values())


async def test_drain_flushes_usage_and_leases(acme: Acme) -> None:
    await acme.configure(concurrency=5)
    async with acme.cluster.beside() as beside:
        headers = {"authorization": f"Bearer {KEY}"}
        assert (await beside.http.post(CHAT, json=BODY, headers=headers)).status_code == 200
        await beside.gateway.drain()
    (row,) = await acme.usage()
    assert row.requests == 1
    assert await acme.num_open() == 0
