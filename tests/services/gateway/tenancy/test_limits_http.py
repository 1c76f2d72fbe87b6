"""What a tenant may and has used, as its clients see it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from services.gateway.service import build_gateway
from services.gateway.tenancy.usage_counter import day_of
from shared.clock import MonotonicClock
from shared.config import GatewayConfig
from shared.errors import Overloaded
from shared.messages import Request
from shared.store import RedisStore
from shared.tenancy.tenant import TENANTS, UsageRow
from shared.tenancy.tenant_admin import TenantAdmin
from tests.servers import NatsServer, RedisServer
from tests.services.gateway.conftest import Cluster, until
from tests.services.gateway.openai.test_chat_http import BODY, CHAT
from tests.services.gateway.openai.test_refusals import check_envelope
from tests.services.gateway.peer import PeerDecode, Run

pytestmark = pytest.mark.own_cluster

KEY = "key-of-acme"
EMBEDDINGS, COMPLETIONS = "/v1/embeddings", "/v1/completions"


class Acme:
    """A tenant and a client of it."""

    def __init__(self, store: RedisStore, http: httpx.AsyncClient, cluster: Cluster) -> None:
        self.store = store
        self.http = http
        self.cluster = cluster
        self.admin = TenantAdmin(store, lambda: 1.7e9)

    async def transition_to(self, **changes: Any) -> None:
        """With new limits, and a clean sheet."""
        await self.store.write([("FLUSHALL",)])
        self.cluster.gateway._limits._accounts.clear()
        await self.admin.add("acme", changes, KEY)
        self.cluster.gateway.api_keys._known.clear()

    async def ask(self, **fields: Any) -> httpx.Response:
        return await self.http.post(CHAT, json={**BODY, **fields})

    async def request(self) -> Request:
        return (await self.cluster.scheduler.submits.get()).request

    async def num_open(self) -> int:
        return (await self.admin.state(await self.admin.one("acme"))).num_open

    async def usage(self) -> list[UsageRow]:
        assert await self.cluster.gateway._usage.flush()
        return await self.admin.usage(["acme"], [day_of(time.time())])


@pytest_asyncio.fixture(loop_scope="session")
async def acme(cluster: Cluster, redis_server: RedisServer) -> AsyncIterator[Acme]:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=2.0)
    gateway = cluster.gateway
    for each in (gateway.api_keys, gateway._limits, gateway._usage):
        each._store = store  # on a busy machine 50 ms go by without Redis being away
    headers = {"authorization": f"Bearer {KEY}"}
    url = gateway.http_address
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        yield Acme(store, http, cluster)
    await store.close()


async def test_limits_stand_in_the_headers_of_every_answer(acme: Acme) -> None:
    await acme.transition_to(requests_per_min=60, output_tokens_per_min=6000)
    for stream in (False, True):
        response = await acme.ask(stream=stream, max_tokens=20)
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "60"
        assert int(response.headers["x-ratelimit-remaining-requests"]) == 59 - stream
        assert response.headers["x-ratelimit-reset-requests"].endswith("s")
        assert response.headers["x-ratelimit-limit-tokens"] == "6000"
        assert int(response.headers["x-ratelimit-remaining-tokens"]) > 5900
    acme.cluster.scheduler.refusal = Overloaded("full")
    refused = await acme.ask()
    check_envelope(refused, 429, "overloaded", None)
    assert refused.headers["x-ratelimit-limit-requests"] == "60"
    await acme.transition_to()
    acme.cluster.scheduler.refusal = None
    assert not [name for name in (await acme.ask()).headers if name.startswith("x-ratelimit")]


async def test_too_many_requests_are_told_why_and_when(acme: Acme) -> None:
    await acme.transition_to(requests_per_min=2)
    for _ in range(2):
        assert (await acme.ask()).status_code == 200
    for _ in range(2):  # the second is refused without a question to Redis
        response = await acme.ask()
        check_envelope(response, 429, "requests_per_min_exceeded", None)
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert 25 <= int(response.headers["retry-after"]) <= 30
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert acme.cluster.scheduler.submits.qsize() == 2
    assert (await acme.http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("name", ["requests_per_min", "concurrency", "kv_quota_tokens"])
async def test_a_limit_of_zero_is_a_refusal(acme: Acme, name: str) -> None:
    await acme.transition_to(**{name: 0})
    response = await acme.ask()
    check_envelope(response, 403, "limit_is_zero", None)
    assert name in response.json()["error"]["message"]
    assert "retry-after" not in response.headers
    assert acme.cluster.scheduler.submits.empty()


async def test_a_request_that_never_fits(acme: Acme) -> None:
    await acme.transition_to(output_tokens_per_min=30, input_tokens_per_min=90)
    check_envelope(await acme.ask(max_tokens=31), 400, "exceeds_limit", "max_tokens")
    check_envelope(await acme.ask(max_tokens=11, n=3), 400, "exceeds_limit", "max_tokens")
    long = {"messages": [{"role": "user", "content": "x y " * 60}]}
    check_envelope(await acme.ask(max_tokens=5, **long), 400, "exceeds_limit", "messages")
    response = await acme.ask(n=3)  # who does not say gets what there is
    assert response.status_code == 200
    assert (await acme.request()).sampling.max_tokens == 10


async def test_a_permit_ends_once_however_its_request_does(acme: Acme) -> None:
    await acme.transition_to(concurrency=1)
    decode, scheduler = acme.cluster.decodes[0], acme.cluster.scheduler
    for _ in range(3):  # one after another there is always room
        assert (await acme.ask(stream=True)).status_code == 200
        assert (await acme.ask()).status_code == 200
    scheduler.refusal = Overloaded("full")
    check_envelope(await acme.ask(), 429, "overloaded", None)
    scheduler.refusal = None
    bad = await acme.ask(max_tokens=10_000)
    check_envelope(bad, 400, "invalid_request", "max_tokens")
    decode.hold_at = 3
    with contextlib.suppress(httpx.ReadTimeout):  # who leaves
        await acme.http.post(CHAT, json={**BODY, "stream": True}, timeout=0.5)
    await until(lambda: acme.cluster.gateway._limits.num_open == 0)
    running = asyncio.create_task(acme.ask())
    await until(lambda: acme.cluster.gateway._limits.num_open == 1)
    check_envelope(await acme.ask(), 429, "concurrency_exceeded", None)
    decode.released.set()
    assert (await running).status_code == 200
    assert (await acme.ask()).status_code == 200
    await until(lambda: not acme.cluster.gateway._limits.num_unsettled)
    assert await acme.num_open() == 0


async def test_several_prompts_are_one_request_of_one_permit(acme: Acme) -> None:
    await acme.transition_to(concurrency=1, requests_per_min=5)
    body = {"model": "tiny", "prompt": ["a b", "c", "d e f"], "max_tokens": 5}
    response = await acme.http.post(COMPLETIONS, json=body)
    assert response.status_code == 200
    assert response.headers["x-ratelimit-remaining-requests"] == "4"
    usage = response.json()["usage"]
    (row,) = await acme.usage()
    assert (row.requests, row.input_tokens) == (1, usage["prompt_tokens"])
    assert row.output_tokens == usage["completion_tokens"]
    assert row.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]


async def test_of_what_was_reserved_only_what_was_delivered_is_used(acme: Acme) -> None:
    await acme.transition_to(output_tokens_per_min=500)
    for _ in range(4):
        response = await acme.ask(max_tokens=400)
        assert response.status_code == 200, response.text
    await until(lambda: not acme.cluster.gateway._limits.num_unsettled)
    read = await acme.admin.state(await acme.admin.one("acme"))
    drawn = response.json()["usage"]["completion_tokens"]
    assert 0 < read.used["output_tokens_per_min"] <= 4 * drawn
    decode = acme.cluster.decodes[0]
    decode.hold_at = 0
    asyncio.get_running_loop().call_later(1, decode.released.set)
    first, second = await asyncio.gather(acme.ask(max_tokens=300), acme.ask(max_tokens=300))
    assert {first.status_code, second.status_code} == {200, 429}
    refused = first if first.status_code == 429 else second
    check_envelope(refused, 429, "output_tokens_per_min_exceeded", None)


async def test_usage_is_what_was_delivered_once(acme: Acme) -> None:
    await acme.transition_to()
    told = [(await acme.ask()).json()["usage"] for _ in range(3)]
    answer = (await acme.ask(max_tokens=3)).json()["usage"]
    # a worker that dies in mid-answer: the request is submitted again
    first = acme.cluster.decodes[0]
    first.hold_at = 4
    running = asyncio.create_task(acme.ask())
    await until(lambda: any(len(run.token_ids) == 4 for run in open_runs(first)))
    await first.die()
    resumed = (await running).json()
    assert resumed["hearth"]["num_resubmissions"] >= 1
    acme.cluster.scheduler.refusal = Overloaded("full")
    assert (await acme.ask()).status_code == 429  # nothing delivered, nothing counted
    (row,) = await acme.usage()
    all_told = [*told, answer, resumed["usage"]]
    assert row.requests == len(all_told)
    assert row.input_tokens == sum(each["prompt_tokens"] for each in all_told)
    assert row.output_tokens == sum(each["completion_tokens"] for each in all_told)
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in all_told]
    assert row.cached_tokens == sum(cached)
    assert row.model == "tiny"


def open_runs(decode: PeerDecode) -> list[Run]:
    return [run for runs in decode.runs.values() for run in runs.values() if run.finish is None]


async def test_a_client_that_leaves_has_used_what_came_until_then(acme: Acme) -> None:
    await acme.transition_to()
    acme.cluster.decodes[0].hold_at = 3
    with contextlib.suppress(httpx.ReadTimeout):
        await acme.http.post(CHAT, json={**BODY, "stream": True}, timeout=0.5)
    await until(lambda: not len(acme.cluster.gateway._driver))
    (row,) = await acme.usage()
    assert (row.requests, row.output_tokens) == (1, 3)


async def test_embeddings_draw_no_output(acme: Acme) -> None:
    await acme.transition_to(output_tokens_per_min=1)
    body = {"model": "tiny", "input": ["a", "b"]}
    for _ in range(3):
        assert (await acme.http.post(EMBEDDINGS, json=body)).status_code == 200
    (row,) = await acme.usage()
    assert (row.requests, row.output_tokens) == (3, 0)
    assert row.input_tokens > 0


async def test_only_allowed_models(acme: Acme) -> None:
    await acme.transition_to(allowed_models=("other",))
    assert (await acme.http.get("/v1/models")).json()["data"] == []
    check_envelope(await acme.http.get("/v1/models/tiny"), 403, "model_not_allowed", "model")
    check_envelope(await acme.http.get("/v1/models/huge"), 404, "model_not_found", "model")
    for body in ({**BODY}, {key: each for key, each in BODY.items() if key != "model"}):
        response = await acme.http.post(CHAT, json=body)
        check_envelope(response, 403, "model_not_allowed", "model")
    check_envelope(await acme.ask(model="huge"), 404, "model_not_found", "model")
    await acme.transition_to(allowed_models=("tiny", "other"))
    assert [each["id"] for each in (await acme.http.get("/v1/models")).json()["data"]] == ["tiny"]
    assert (await acme.ask()).status_code == 200


async def test_a_request_carries_what_its_tenant_has(acme: Acme) -> None:
    await acme.transition_to(
        allowed_regions=("eu", "ch"),
        kv_quota_tokens=4096,
        weight=2.5,
        priority=2,
        is_zero_retention=True,
    )
    for asked, priority in ((None, 2), (0, 0), (-3, -3), (9, 2)):
        assert (await acme.ask(priority=asked)).status_code == 200
        request = await acme.request()
        assert request.priority == priority
    assert request.allowed_regions == ("eu", "ch")
    assert (request.kv_quota_tokens, request.weight) == (4096, 2.5)
    assert request.is_zero_retention
    await acme.transition_to()
    assert (await acme.ask(priority=1)).status_code == 200
    request = await acme.request()
    assert (request.allowed_regions, request.kv_quota_tokens, request.priority) == ((), 0, 0)
    assert (request.weight, request.is_zero_retention) == (1.0, False)


async def test_no_region_at_all_is_not_every_region(acme: Acme) -> None:
    await acme.transition_to(allowed_regions=())
    check_envelope(await acme.ask(), 403, "no_region_allowed", None)


async def test_no_body_field_changes_the_tenant(acme: Acme) -> None:
    await acme.transition_to(priority=-1)
    fields = {"tenant_id": "other", "weight": 99, "allowed_regions": [], "kv_quota_tokens": 1}
    assert (await acme.ask(**fields)).status_code == 200
    request = await acme.request()
    assert (request.tenant_id, request.weight, request.priority) == ("acme", 1.0, -1)


async def test_unknown_tenant_and_broken_record(acme: Acme) -> None:
    await acme.transition_to()
    await acme.store.write([("HDEL", TENANTS, "acme")])
    check_envelope(await acme.ask(), 403, "unknown_tenant", None)
    await acme.store.write([("HSET", TENANTS, "acme", "{")])
    check_envelope(await acme.ask(), 503, "dependency_unavailable", None)


async def test_what_is_pending_is_flushed_when_the_gateway_drains(
    acme: Acme, gateway_config: GatewayConfig, nats_server: NatsServer
) -> None:
    await acme.transition_to(concurrency=5)
    config = msgspec.structs.replace(
        gateway_config, nats_url=nats_server.url("gateway-2"), process_id="gateway-2"
    )
    gateway = await build_gateway(config)
    await gateway.start()
    await until(lambda: gateway.readiness().ready)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=gateway.http_address, headers=headers) as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 200
    await gateway.drain()
    await gateway.stop()
    (row,) = await acme.usage()
    assert row.requests == 1
    assert await acme.num_open() == 0
