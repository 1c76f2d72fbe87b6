"""What every endpoint of every dialect does, over HTTP and over NATS: behaviours × endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import httpx
import pytest

from services.gateway.dialects.paths import ACCOUNT_ROOTS
from services.gateway.dialects.route_options import BODY_KIND
from services.gateway.request.generation_request import scoped_affinity_key
from services.gateway.tenancy.errors import ForeignAccount, ModelNotAllowed, RequestsExhausted
from shared.clock import MonotonicClock
from shared.errors import (
    AuthenticationFailed,
    InvalidRequest,
    NoCapacity,
    Overloaded,
    PayloadTooLarge,
    UnknownModel,
)
from shared.store import RedisStore
from shared.tenancy.model_alias_admin import ModelAliasAdmin
from tests.services.gateway.dialects.endpoints import (
    BODIES,
    CALLS,
    GENERATING,
    REASONS,
    ROWS,
    WRITING,
    Row,
)
from tests.services.gateway.nats_api.conftest import Api, api, connected
from tests.services.gateway.nats_api.test_requests import limited
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S, until

__all__ = ["api"]

of_each = partial(pytest.mark.parametrize, "row", ids=str)
STREAMED = pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
NO_OBJECTS = (b"{", b"[]", b"null", b'"x"', b"1", b"\xff\xfd", b"[" * 30_000, b"a=b")
WRONG_KEYS = (
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Basic eDp5"},
    {"x-api-key": "wrong"},
)
AFFINITY = (
    *("x-session-affinity", "session-id", "x-claude-code-session-id", "x-openwebui-chat-id"),
)


async def test_each_route_with_a_body_has_its_rows(api: Api) -> None:
    app: Any = api.cluster.gateway._web_server._server.config.app
    routes = {
        route.path
        for route in app.routes
        for handler in getattr(route, "route_handlers", ())
        if BODY_KIND in handler.opt and "POST" in handler.http_methods
    }
    without_model = {f"{root}/run" for root in ACCOUNT_ROOTS}
    assert routes - without_model == {path for row in ROWS for path in row.paths}
    assert BODIES.keys() == {row.name for row in ROWS}


@of_each(argvalues=ROWS)
async def test_smallest_body_is_answered_on_each_path(api: Api, row: Row) -> None:
    """Also below the account of the key; not below another."""
    for number in range(len(row.paths) if row.transport == "http" else 1):
        reply = await row.send(api, row.body, path=row.path(number=number))
        assert reply.status == 200, reply.content
        assert reply.request_id and reply.objects
        if "{account:str}" in row.paths[number]:
            foreign = await row.send(
                api, row.body, path=row.path(number=number, account="tenant-2")
            )
            row.check_rejected(foreign, ForeignAccount("x"))


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


@of_each(argvalues=ROWS)
async def test_wrong_key_is_refused(api: Api, nats_server: NatsServer, row: Row) -> None:
    if row.transport == "nats":
        async with connected(nats_server, "client-2") as (client, raw):
            reply = await row.send(Api(api.cluster, client, raw, "client-2"), row.body)
            row.check_rejected(reply, AuthenticationFailed("x"))
        return
    async with httpx.AsyncClient(base_url=api.cluster.gateway.http_address) as keyless:
        for headers in WRONG_KEYS:
            reply = await row.send(api, row.body, http=keyless, headers=headers)
            row.check_rejected(reply, AuthenticationFailed("x"))
            assert headers or b"`x-api-key: <key>`" in reply.content


@of_each(argvalues=ROWS)
async def test_model_that_is_not_served_is_refused(api: Api, row: Row) -> None:
    body, model = row.with_model("huge")
    reply = await row.send(api, body, path=row.path(model=model))
    row.check_rejected(reply, UnknownModel("x", param="model"))
    assert b"huge" in reply.content
    async with limited(api, allowed_models=("other",)):
        reply = await row.send(api, row.body)
        row.check_rejected(reply, ModelNotAllowed("x", param="model"))
    assert api.cluster.scheduler.submits.empty()


@of_each(argvalues=ROWS)
async def test_alias_names_the_model(api: Api, row: Row) -> None:
    store = RedisStore(api.cluster.gateway._config.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    admin, known = ModelAliasAdmin(store, lambda: 0.0), api.cluster.gateway._models.aliases._known
    await admin.put("@cf/fast", "tiny", "tenant-1")
    known.clear()
    try:
        body, model = row.with_model("@cf/fast")
        reply = await row.send(api, body, path=row.path(model=model))
        assert reply.status == 200, reply.content
    finally:
        await admin.remove("@cf/fast", "tenant-1")
        await store.close()
        known.clear()


@of_each(argvalues=ROWS)
async def test_tenant_beyond_its_rate_is_told_when_to_retry(api: Api, row: Row) -> None:
    async with limited(api, requests_per_min=1):
        first = await row.send(api, row.body)
        assert (first.status, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
        second = await row.send(api, row.body)
        row.check_rejected(second, RequestsExhausted("x", retry_after_s=1, headers={}))
        assert int(second.headers["retry-after"]) > 5


@of_each(argvalues=ROWS)
async def test_body_beyond_the_bound_is_refused(api: Api, row: Row) -> None:
    large = json.dumps(row.body).encode().ljust(64 * 1024 + 1)
    row.check_rejected(await row.send(api, large), PayloadTooLarge("x"))
    assert (await row.send(api, large[:-1])).status == 200


@of_each(argvalues=ROWS)
async def test_body_that_is_no_object_is_refused(api: Api, row: Row) -> None:
    for data in NO_OBJECTS if row.name == "workers_ai" else (b"", *NO_OBJECTS):
        row.check_rejected(await row.send(api, data), InvalidRequest("x"))
    assert api.cluster.scheduler.submits.empty()


@of_each(argvalues=ROWS)
async def test_draining_gateway_refuses(
    api: Api, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.cluster.gateway.capacity, "is_draining", True)
    row.check_rejected(await row.send(api, row.body), NoCapacity("x", retry_after_s=1))


@pytest.mark.parametrize(("row", "is_streamed"), CALLS, ids=str)
async def test_refusal_of_the_scheduler_is_the_response(
    api: Api, row: Row, is_streamed: bool
) -> None:
    fields = {"stream": True} if is_streamed else {}
    for error in (Overloaded("x", retry_after_s=2.5), NoCapacity("x", retry_after_s=1.0)):
        api.cluster.scheduler.refusal = type(error)("full", retry_after_s=error.retry_after_s)
        reply = await row.send(api, {**row.body, **fields})
        row.check_rejected(reply, error)
        assert reply.headers["retry-after"] == ("3" if isinstance(error, Overloaded) else "1")


# ── generations ──────────────────────────────────────────────────────────────────────────────────


@of_each(argvalues=GENERATING)
async def test_session_of_a_header_reaches_the_scheduler(api: Api, row: Row) -> None:
    for name in AFFINITY if row.transport == "http" else ("Hearth-Affinity",):
        assert (await row.send(api, row.body, headers={name: "mine"})).status == 200
        submitted = api.cluster.scheduler.submitted[-1]
        assert submitted.affinity_key == scoped_affinity_key("tenant-1", "mine"), name


@of_each(argvalues=GENERATING)
async def test_warning_names_an_unknown_field(api: Api, row: Row) -> None:
    reply = await row.send(api, {**row.body, "temprature": 1})
    assert reply.status == 200
    assert b"temprature is unknown here and was ignored" in reply.content


@of_each(argvalues=WRITING)
@STREAMED
async def test_output_ends_at_the_number_of_tokens(api: Api, row: Row, is_streamed: bool) -> None:
    limit = row.field("max_tokens", "max_output_tokens")
    reply = await row.send(api, {**row.body, limit: 3, "stream": is_streamed})
    assert (reply.status, reply.reason) == (200, REASONS[row.name][0]), reply.content
    assert api.cluster.scheduler.submitted[-1].request.sampling.max_tokens == 3


@of_each(argvalues=[each for each in WRITING if each.field("stop", "stop_sequences")])
@STREAMED
async def test_output_ends_before_a_stop_string(api: Api, row: Row, is_streamed: bool) -> None:
    stop = row.field("stop", "stop_sequences")
    reply = await row.send(api, {**row.body, stop: ["how"], "stream": is_streamed})
    assert (reply.status, reply.reason) == (200, REASONS[row.name][1]), reply.content
    assert reply.text.startswith("hello world, ") and "how" not in reply.text


@of_each(argvalues=WRITING)
async def test_client_that_leaves_ends_its_request(api: Api, row: Row) -> None:
    """Its worker frees the blocks of a placement that is aborted."""
    decode = api.cluster.decodes[0]
    decode.hold_at = 5
    async with aclosing(_parts(api, row)) as parts:
        await anext(parts)
        await api.cluster.until_placed()
        ((placement_id, _),) = decode.runs.items()
    abort = await asyncio.wait_for(decode.aborts.get(), timeout=LIMIT_S)
    assert (abort.placement_id, abort.reason) == (placement_id, "client_gone")
    assert not decode.runs
    await until(lambda: not len(api.cluster.gateway._driver))


async def _parts(api: Api, row: Row) -> AsyncIterator[Any]:
    """Of a streamed response, as they arrive."""
    body = {**row.body, "stream": True}
    if row.transport == "nats":
        async with aclosing(api.client.stream(row.name, body)) as events:
            async for event in events:
                yield event
        return
    async with api.cluster.http.stream("POST", row.path(), json=body) as response:
        async for part in response.aiter_bytes():
            yield part
