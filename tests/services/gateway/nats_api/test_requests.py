"""The life of a request over NATS: limits, deadline, cancellation, clients that vanish."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
import structlog.testing

from services.client.hearth_nats import ApiError, HearthClient
from services.gateway.nats_api import api as api_module
from services.gateway.nats_api import generation, listeners, served_request
from services.gateway.tenancy.region_rule import RegionRule
from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.tenancy.tenant_admin import TenantAdmin
from tests.services.gateway.conftest import ANSWER, Cluster, place_in_region, store_key
from tests.services.gateway.dialects.openai.test_chat_http import BODY
from tests.services.gateway.nats_api.conftest import Api, all_of, connected, next_of
from tests.services.gateway.nats_api.test_responses import check_error
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S, until

STREAMED = {**BODY, "stream": True}


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "CHECK_S", 0.04)
    monkeypatch.setattr(listeners, "TICK_S", 0.02)


@contextlib.asynccontextmanager
async def limited(api: Api, **changes: Any) -> AsyncIterator[None]:
    """Meanwhile the tenant has these limits and permissions."""
    gateway = api.cluster.gateway
    store = RedisStore(gateway._config.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    await TenantAdmin(store, lambda: 0.0).change("tenant-1", changes)
    gateway.api_keys._known.clear()
    try:
        yield
    finally:
        await store.write([("FLUSHALL",)])
        await store_key(store)
        await store.close()
        gateway.api_keys._known.clear()
        gateway._driver._streams._changed_regions.clear()
        gateway._limits._accounts.clear()


async def open_requests(cluster: Cluster, count: int) -> None:
    await until(lambda: len(cluster.gateway._driver) == count)


def text_of(events: list[Any]) -> str:
    return "".join(each["choices"][0]["delta"].get("content", "") for each in events)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────


async def test_limits_are_those_of_the_tenant(api: Api) -> None:
    gateway, decode = api.cluster.gateway, api.cluster.decodes[0]
    async with limited(api, requests_per_min=4, concurrency=1):
        first = await all_of(await api.send("chat", STREAMED))
        for message in (first[0], first[-1]):
            assert (message.headers or {})["x-ratelimit-remaining-requests"] == "3"
        for message in first[1:-1]:  # none if the text came at once
            assert "x-ratelimit-remaining-requests" not in (message.headers or {})
        await until(lambda: not gateway._limits.num_open)
        decode.hold_at = 2
        running = await api.send("chat", STREAMED)
        await open_requests(api.cluster, 1)
        check_error(await api.reply("chat", BODY), 429, "concurrency_exceeded", None)
        decode.released.set()
        await all_of(running)
        await until(lambda: not gateway._limits.num_open)
        assert (await api.client.request("models", {}))["data"]  # is free


async def test_permissions_are_those_of_the_tenant(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with limited(api, allowed_models=()):
        assert (await api.client.request("models", {}))["data"] == []
    async with limited(api, concurrency=0):
        check_error(await api.reply("chat", BODY), 403, "limit_is_zero", None)
    async with limited(api, allowed_regions=("eu",), is_zero_retention=True):
        check_error(await api.reply("chat", {}), 403, "no_region_allowed", None)
        gateway = api.cluster.gateway
        place_in_region(monkeypatch, gateway, RegionRule("eu"))
        monkeypatch.setattr(gateway._driver, "_schedulers_for", lambda _: ["scheduler-1"])
        monkeypatch.setattr(gateway._health_monitor.refusals, "region", "eu")
        gateway._driver._streams._changed_regions.clear()  # found before, in another region
        await api.reply("chat", BODY)
        submitted = api.cluster.scheduler.submitted[-1].request
        assert submitted.tenant_id == "tenant-1"
        assert (submitted.is_zero_retention, submitted.allowed_regions) == (True, ("eu",))


async def test_too_many_requests_at_once_are_rejected(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    nats_api = api.cluster.gateway._nats_api
    assert nats_api is not None
    api.cluster.decodes[0].hold_at = 2
    monkeypatch.setattr(nats_api, "_max_requests", 2)
    monkeypatch.setattr(api_module, "MAX_CLIENT_SHARE", 1)
    running = [await api.send("chat", STREAMED) for _ in range(2)]
    await open_requests(api.cluster, 2)
    check_error(await api.reply("chat", STREAMED), 429, "overloaded", None)
    api.cluster.decodes[0].released.set()
    for each in running:
        await all_of(each)


async def test_bodies_count_for_the_budget_of_their_tenant(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.cluster.gateway.transport.budget, "_max_tenant_bytes", 50)
    check_error(await api.reply("chat", BODY), 429, "overloaded", None)
    assert (await api.client.request("tokenize", {"prompt": "x"}))["count"] > 0


# ── headers ──────────────────────────────────────────────────────────────────────────────────────


async def test_headers_reach_the_request(api: Api) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"Hearth-Deadline-S": "7.5", "Hearth-Affinity": "s1", "traceparent": trace}
    with structlog.testing.capture_logs() as logs:
        reply = await api.reply("chat", BODY, headers=headers)
    submit = api.cluster.scheduler.submitted[-1]
    assert 0 < submit.request.deadline_s <= 7.5  # what is left
    assert submit.affinity_key
    request_id = (reply.headers or {})["Hearth-Request"]
    assert submit.request.request_id == request_id == json.loads(reply.data)["hearth"]["request_id"]
    traced = [each for each in logs if each["event"] == "request_traced"]
    assert [(each["request"], each["traceparent"]) for each in traced] == [(request_id, trace)]
    await api.reply("chat", BODY)
    deadline_s = api.cluster.scheduler.submitted[-1].request.deadline_s
    assert deadline_s <= served_request.MAX_DEADLINE_S < served_request.REPLY_S


async def test_deadline_ends_the_request(api: Api) -> None:
    api.cluster.decodes[0].hold_at = 2
    for body in (STREAMED, BODY):
        replies = await api.send("chat", body, headers={"Hearth-Deadline-S": "0.2"})
        check_error((await all_of(replies))[-1], 504, "deadline_exceeded", None)
    expired = await api.reply("chat", BODY, headers={"Hearth-Deadline-S": "1e-9"})
    check_error(expired, 504, "deadline_exceeded", None)


# ── cancellation ─────────────────────────────────────────────────────────────────────────────────


HERE = "gateway-1.-"


async def test_cancelled_stream_ends_and_frees_its_worker(api: Api) -> None:
    decode = api.cluster.decodes[0]
    decode.hold_at = 3
    replies = await api.send("chat", STREAMED)
    headers = (await next_of(replies)).headers
    assert headers["Hearth-Gateway"] == HERE
    await api.cluster.until_placed()
    assert await api.client.cancel(headers["Hearth-Request"], HERE)
    check_error((await all_of(replies))[-1], 499, "request_cancelled", None)
    assert (await asyncio.wait_for(decode.aborts.get(), timeout=LIMIT_S)).reason == "client_gone"
    assert not await api.client.cancel(headers["Hearth-Request"], HERE)
    assert not await api.client.cancel("unknown", HERE)
    with pytest.raises(ApiError, match="503"):
        await api.client.cancel("unknown", "gateway-9.-")


async def test_cancellation_to_any_gateway_says_where_it_belongs(api: Api) -> None:
    """A client of one gateway may leave the gateway out."""
    api.cluster.decodes[0].hold_at = 3
    replies = await api.send("chat", STREAMED)
    request_id = (await next_of(replies)).headers["Hearth-Request"]
    refused = await api.reply("cancel", {"request": "of another gateway"})
    check_error(refused, 400, "invalid_request", "request")
    assert "cancel.client-1.{Hearth-Gateway}" in refused.headers["Nats-Service-Error"]
    assert (await api.client.request("cancel", {"request": request_id}))["cancelled"]
    check_error((await all_of(replies))[-1], 499, "request_cancelled", None)


@pytest.mark.parametrize("gateway_id", ["", HERE])
async def test_large_cancellation_is_not_decoded(api: Api, gateway_id: str) -> None:
    body = {"request": "x" * api_module.MAX_CANCEL_BYTES}
    refused = await api.reply("cancel", body, gateway_id=gateway_id)
    check_error(refused, 413, "payload_too_large", None)


async def test_one_client_has_a_share_of_the_open_requests(
    api: Api, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.cluster.gateway._nats_api, "_max_requests", 8)
    api.cluster.decodes[0].hold_at = api.cluster.decodes[1].hold_at = 3
    running = [await api.send("chat", STREAMED) for _ in range(2)]
    await open_requests(api.cluster, 2)
    refused = await api.reply("chat", STREAMED)
    check_error(refused, 429, "overloaded", None)
    assert "of this client" in refused.headers["Nats-Service-Error"]
    async with connected(nats_server, "client-2") as (other, _):
        with pytest.raises(ApiError, match="401"):  # it may ask
            await other.request("models", {})
    for each in api.cluster.decodes:
        each.released.set()
    for replies in running:
        assert ((await all_of(replies))[-1].headers or {})["Hearth-End"] == "stop"


async def test_request_is_cancelled_while_it_is_prepared(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, began = api.cluster.gateway, asyncio.Event()

    async def wait(*_: object, **__: object) -> None:
        began.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway.preparer, "prepare", wait)
    replies = await api.send("chat", BODY)
    await asyncio.wait_for(began.wait(), timeout=LIMIT_S)
    assert gateway._nats_api is not None
    ((_, request_id),) = gateway._nats_api._running
    assert await api.client.cancel(request_id, HERE)
    check_error(await next_of(replies), 499, "request_cancelled", None)
    assert not api.cluster.scheduler.submitted
    await until(lambda: not gateway._limits.num_open)


async def test_client_cannot_cancel_the_request_of_another(
    api: Api, nats_server: NatsServer
) -> None:
    api.cluster.decodes[0].hold_at = 3
    replies = await api.send("chat", STREAMED)
    request_id = (await next_of(replies)).headers["Hearth-Request"]
    async with connected(nats_server, "client-2") as (other, _):
        assert not await other.cancel(request_id, HERE)
    api.cluster.decodes[0].released.set()
    assert ((await all_of(replies))[-1].headers or {})["Hearth-End"] == "stop"


# ── clients that vanish ──────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("quick_checks")
@pytest.mark.parametrize("body", [STREAMED, BODY])
@pytest.mark.parametrize("phase", ["running", "queued"])
async def test_vanished_client_frees_its_worker(
    api: Api, nats_server: NatsServer, body: dict[str, Any], phase: str
) -> None:
    """Streamed or not: a client that says so is checked before any response."""
    cluster = api.cluster
    cluster.decodes[0].hold_at = 3
    cluster.scheduler.is_holding = phase == "queued"
    connection = await nats.connect(
        nats_server.url("client-1"), inbox_prefix=b"_INBOX.client-1", allow_reconnect=False
    )
    headers = {} if body is STREAMED else {"Hearth-Checks": "true"}
    replies = Api(cluster, api.client, connection)
    await replies.send("chat", body, headers=headers)
    await open_requests(cluster, 1)
    streams = cluster.gateway._driver._streams._by_request
    if phase == "running":
        await cluster.until_placed()
    else:
        await until(lambda: all(each.scheduler_id for each in streams.values()))
    await connection.close()
    await open_requests(cluster, 0)
    if phase == "running":
        assert (await cluster.decodes[0].aborts.get()).reason == "client_gone"
    else:
        assert await asyncio.wait_for(cluster.scheduler.cancels.get(), timeout=LIMIT_S)


@pytest.mark.usefixtures("quick_checks")
async def test_client_that_does_not_answer_is_cut_off(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.cluster.decodes[0].hold_at = 3
    replies = await api.send("chat", STREAMED)  # raw: it subscribes, and answers nothing
    await open_requests(api.cluster, 1)
    assert api.cluster.gateway._nats_api is not None
    opened = api.cluster.gateway._nats_api._parts.listeners._open
    await until(lambda: all(each.num_checks for each in opened.values()))
    monkeypatch.setattr(listeners, "SILENCE_S", 0.0)
    await open_requests(api.cluster, 0)
    messages = await all_of(replies)
    assert (messages[-1].headers or {})["Hearth-End"] == "error"
    assert [each for each in messages if each.reply and not each.data]


@pytest.mark.usefixtures("quick_checks")
async def test_client_that_answers_waits_as_long_as_it_takes(api: Api) -> None:
    """Each answer begins its time anew."""
    gateway = api.cluster.gateway
    api.cluster.decodes[0].hold_at = 3
    streamed = asyncio.create_task(api.events("chat", dict(BODY)))
    whole = asyncio.create_task(api.client.request("chat", BODY))
    await open_requests(api.cluster, 2)
    assert gateway._nats_api is not None
    opened = gateway._nats_api._parts.listeners._open
    first = {name: each.answered_at for name, each in opened.items()}
    await until(lambda: all(each.num_checks > 10 for each in opened.values()))
    await until(lambda: all(each.answered_at > first[name] for name, each in opened.items()))
    api.cluster.decodes[0].released.set()
    assert text_of(await streamed) == ANSWER
    assert (await whole)["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.long)])
async def test_many_vanished_clients_leave_nothing(
    api: Api, nats_server: NatsServer, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ten connections that are lost at once; `api` checks the gateway."""
    cluster = api.cluster
    monkeypatch.setattr(listeners, "SILENCE_S", 600.0)
    monkeypatch.setattr(listeners, "TICK_S", 0.02)
    for decode in cluster.decodes:
        decode.hold_at = 3
    lost = [
        await nats.connect(nats_server.url("client-1"), inbox_prefix=b"_INBOX.client-1")
        for _ in range(10)
    ]
    for number in range(count):
        await Api(cluster, api.client, lost[number % 10]).send("chat", STREAMED)
        if number % 50 == 49:  # more than 512 of a tenant cannot wait for their preparation
            await until(lambda: len(cluster.gateway._driver) == number + 1)  # noqa: B023
    for connection in lost:
        await connection.close()
    monkeypatch.setattr(listeners, "CHECK_S", 0.04)
    await until(lambda: not len(cluster.gateway._driver))
    await until(lambda: not cluster.gateway._limits.num_open)
    assert text_of(await api.events("chat", {**BODY, "max_tokens": 2}))


async def test_error_while_writing_ends_one_request_alone(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(generation, "_write_body", None)
        with structlog.testing.capture_logs() as logs:
            check_error(await api.reply("chat", BODY), 500, "internal_error", None)
        assert "request_failed" in [each["event"] for each in logs]
    await until(lambda: not api.cluster.gateway._limits.num_open)
    with pytest.raises(ApiError, match="404"):
        await api.client.request("nothing", BODY)
    assert isinstance(api.client, HearthClient)
    assert text_of(await api.events("chat", dict(BODY))) == ANSWER
