"""Several gateways in one queue group, their ends, and losses behind a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from services.client import hearth_nats
from services.client.hearth_nats import ApiError, HearthClient, ResponseLost
from services.gateway.dialects.dialect_table import DIALECTS
from services.gateway.nats_api import listeners
from services.gateway.nats_api.endpoints import api_endpoints
from services.gateway.service import GatewayService
from services.gateway.text.model_files import ModelFiles
from shared.config import GatewayConfig
from shared.errors import NoCapacity
from tests.services.gateway import peer
from tests.services.gateway.conftest import ANSWER, PROCESSES, Cluster, running_cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY
from tests.services.gateway.nats_api.conftest import (
    Api,
    all_of,
    connected,
    has_joined,
    is_idle,
    next_of,
)
from tests.services.gateway.nats_api.test_requests import STREAMED, open_requests, text_of
from tests.services.gateway.nats_api.test_responses import check_error
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S, until


@contextlib.asynccontextmanager
async def second_gateway(cluster: Cluster) -> AsyncIterator[GatewayService]:
    async with cluster.beside() as beside:
        yield beside.gateway


async def die(gateway: GatewayService) -> None:
    """Like a killed process: it sends nothing more."""
    for bus in (gateway._bus, gateway._clients):
        await bus._client._close(bus._client.CLOSED, do_cbs=False)  # type: ignore[union-attr]


@pytest.mark.own_cluster
async def test_stream_of_a_lost_gateway_is_repeated_through_another(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = api.cluster.decodes[0]
    async with second_gateway(api.cluster) as second:
        decode.hold_at = 5
        received: list[Any] = []

        async def receive() -> None:
            async for event in api.client.stream("chat", {**BODY, "seed": 7}):
                received.append(event)
                if text_of(received):
                    monkeypatch.setattr(hearth_nats, "MAX_SILENCE_S", 0.2)  # from now on

        receiving = asyncio.create_task(receive())
        await until(lambda: len(api.cluster.gateway._driver) + len(second._driver) == 1)
        await until(lambda: text_of(received))
        gateways = [api.cluster.gateway, second]
        answering, other = sorted(gateways, key=lambda each: -len(each._driver))
        await die(answering)
        with pytest.raises(ResponseLost, match="no message"):
            await receiving
        assert 0 < len(text_of(received)) < len(ANSWER)
        monkeypatch.setattr(hearth_nats, "MAX_SILENCE_S", LIMIT_S)
        decode.released.set()
        decode.hold_at = None
        again = [each async for each in api.client.stream("chat", {**BODY, "seed": 7})]
        assert text_of(again) == ANSWER
        first, *_, last = [each.request for each in api.cluster.scheduler.submitted]
        assert first.sampling.seed == last.sampling.seed == 7
        assert (first.gateway_id, last.gateway_id) == (
            answering._config.process_id,
            other._config.process_id,
        )
        answering._driver.close_all(NoCapacity("the process is dead"))


async def test_lost_worker_does_not_end_the_stream(api: Api) -> None:
    first = api.cluster.decodes[0]
    first.hold_at = 5
    streaming = asyncio.create_task(api.events("chat", {**BODY, "seed": 7}))
    while (await first.emitted.get()).first_position < 4:
        pass
    api.cluster.scheduler.workers = api.cluster.decodes[1:]
    await first.die()
    assert text_of(await streaming) == ANSWER


@pytest.mark.own_cluster
async def test_draining_gateway_takes_no_request_and_finishes_its_streams(api: Api) -> None:
    decode = api.cluster.decodes[0]
    decode.hold_at = 5
    running = await api.send("chat", STREAMED)
    while (await decode.emitted.get()).first_position < 4:
        pass
    draining = asyncio.create_task(api.cluster.gateway.drain())
    await until(lambda: not has_joined(api.cluster.gateway))
    decode.hold_at = None
    statuses = []
    while "503" not in statuses:  # until then the server may not know that the gateway has left
        statuses.append(((await api.reply("chat", BODY)).headers or {}).get("Status"))
        assert len(statuses) < 10
    async with second_gateway(api.cluster) as second:
        assert text_of(await api.events("chat", dict(BODY))) == ANSWER
        assert not draining.done()
        decode.released.set()
        end = (await all_of(running))[-1]
        assert (end.headers or {})["Hearth-End"] == "stop"
        await asyncio.wait_for(draining, timeout=LIMIT_S)
        await until(lambda: is_idle(second))


async def test_no_request_fails_while_gateways_come_and_go(api: Api) -> None:
    texts: list[str] = []
    is_over = asyncio.Event()

    async def load() -> None:
        while not is_over.is_set():
            texts.append(text_of(await api.events("chat", {**BODY, "max_tokens": 4})))

    loading = [asyncio.create_task(load()) for _ in range(4)]
    for _ in range(2):
        num_texts = len(texts)
        async with second_gateway(api.cluster) as second:
            await until(lambda: second._nats_api.counts["chat"].num_requests > 3)
            await second.drain()
        assert len(texts) > num_texts
    is_over.set()
    await asyncio.gather(*loading)
    assert set(texts) == {texts[0]}


@pytest.mark.own_cluster
async def test_stopped_gateway_ends_its_streams_with_an_error(api: Api) -> None:
    for each in api.cluster.decodes:
        each.hold_at = 5
    async with second_gateway(api.cluster) as second:
        assert api.cluster.gateway._nats_api is not None
        await api.cluster.gateway._nats_api.leave()
        running = [await api.send("chat", body) for body in (STREAMED, BODY)]
        await until(lambda: len(second._driver) == 2)
    for each in running:
        check_error((await all_of(each))[-1], 503, "no_capacity", None)


@pytest.mark.own_cluster
async def test_ready_gateway_takes_requests(api: Api) -> None:
    """Who sees `/ready` may send at once."""
    first = api.cluster.gateway._nats_api
    assert first is not None
    await first.leave()
    async with api.cluster.beside(poll_s=0.0) as beside:
        assert (await api.client.request("models", {}))["data"]
        assert beside.gateway.readiness().ready


@pytest.mark.usefixtures("no_shared_cluster")
async def test_gateway_without_workers_takes_no_request(
    nats_server: NatsServer, gateway_config: GatewayConfig
) -> None:
    """Another one may have workers."""
    gateway = await PROCESSES.gateway(gateway_config)
    await gateway.start()
    try:
        async with connected(nats_server, "client-1") as (client, _):
            with pytest.raises(ApiError, match="503: no gateway"):
                await client.request("models", {})
    finally:
        await gateway.stop()


@pytest.mark.own_cluster
async def test_discovery_finds_every_gateway_and_its_numbers(api: Api) -> None:
    async with second_gateway(api.cluster):
        for _ in range(6):
            await api.client.request("tokenize", {"prompt": "x"})
        check_error(await api.reply("tokenize", {}), 400, "invalid_request", "prompt")
        inbox = api.raw.new_inbox()
        subscription = await api.raw.subscribe(inbox)
        found: dict[str, list[Any]] = {}
        for verb in ("PING", "INFO", "STATS"):
            await api.raw.publish(f"$SRV.{verb}.hearth", b"", reply=inbox)
            replies = [await subscription.next_msg(timeout=LIMIT_S) for _ in range(2)]
            found[verb] = [json.loads(each.data) for each in replies]
    gateways = {each["metadata"]["gateway"] for each in found["PING"]}
    assert gateways == {"gateway-1", "gateway-2"}
    assert len({each["id"] for each in found["PING"]}) == 2
    for info in found["INFO"]:
        assert [each["name"] for each in info["endpoints"]] == list(api_endpoints(DIALECTS))
        chat, *_, cancel = info["endpoints"]
        assert (chat["subject"], chat["queue_group"]) == ("hearth.v1.api.chat.*", "gateway")
        assert cancel["queue_group"] == "gateway"
        assert chat["metadata"]["streams"] == "true"
        assert (
            "messages"
            in json.loads(chat["metadata"]["request_schema"])["$defs"]["ChatCompletionRequest"][
                "required"
            ]
        )
    counts = [
        endpoint
        for stats in found["STATS"]
        for endpoint in stats["endpoints"]
        if endpoint["name"] == "tokenize"
    ]
    assert sum(each["num_requests"] for each in counts) == 7
    assert sum(each["num_errors"] for each in counts) == 1
    assert "400 invalid_request" in [each["last_error"] for each in counts]
    assert all(each["processing_time"] > 0 for each in counts if each["num_requests"])


@pytest.mark.usefixtures("no_shared_cluster")
async def test_prompt_of_200000_tokens(
    nats_server: NatsServer,
    gateway_config: GatewayConfig,
    model_files: ModelFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One message of a MiB; a body of 5 MiB is rejected before it is sent."""
    card = msgspec.structs.replace(peer.CARD, max_context_tokens=300_000)
    monkeypatch.setattr(peer, "CARD", card)
    config = msgspec.structs.replace(gateway_config, max_body_bytes=4 << 20)
    body = {"prompt": [7, 8, 9, 10] * 50_000, "max_tokens": 3}
    async with running_cluster(nats_server, config, model_files) as cluster:
        await until(lambda: has_joined(cluster.gateway))
        async with connected(nats_server, "client-1") as (client, raw):
            completion = await client.request("completions", body)
            assert completion["usage"]["prompt_tokens"] == 200_000
            too_large = await Api(cluster, client, raw).reply("chat", b" " * (4 << 20 | 1))
            check_error(too_large, 413, "payload_too_large", None)
            with pytest.raises(ApiError, match="413"):
                await client.request("chat", {"x": "x" * (5 << 20)})
            assert isinstance(client, HearthClient)
        await until(lambda: is_idle(cluster.gateway))


async def test_response_beyond_a_message_is_an_error(api: Api) -> None:
    parts = api.cluster.gateway._nats_api._parts  # type: ignore[union-attr]
    unchanged = parts.max_reply_bytes
    object.__setattr__(parts, "max_reply_bytes", lambda: 8192 + 300)
    reply = await next_of(await api.send("chat", BODY))
    object.__setattr__(parts, "max_reply_bytes", unchanged)
    check_error(reply, 413, "payload_too_large", None)
    assert "as a stream" in (reply.headers or {})["Nats-Service-Error"]
    assert text_of(await api.events("chat", dict(BODY))) == ANSWER


@pytest.mark.usefixtures("no_shared_cluster")
async def test_lost_connection_to_nats_ends_the_streams_of_a_gateway(
    nats_server: NatsServer,
    gateway_config: GatewayConfig,
    model_files: ModelFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server refuses their next messages: nothing may run on for nobody."""
    monkeypatch.setattr(listeners, "TICK_S", 0.02)
    async with running_cluster(nats_server, gateway_config, model_files) as cluster:
        cluster.decodes[0].hold_at = 3
        async with connected(nats_server, "client-1") as (client, _):
            streaming = asyncio.create_task(anext(client.stream("chat", dict(BODY))))
            await open_requests(cluster, 1)
            bus = cluster.gateway._clients
            await bus._client._process_op_err(OSError("lost"))  # type: ignore[attr-defined]
            await open_requests(cluster, 0)
            streaming.cancel()
            await asyncio.gather(streaming, return_exceptions=True)
            await until(lambda: cluster.is_ready)
            cluster.decodes[0].reset(cluster.answer)
            events = [each async for each in client.stream("chat", dict(BODY))]
            assert text_of(events) == ANSWER
        await until(lambda: is_idle(cluster.gateway))


@pytest.mark.usefixtures("no_shared_cluster")
async def test_gateway_that_never_started_stops(gateway_config: GatewayConfig) -> None:
    """As after an error of its start, which its operator would otherwise not see."""
    gateway = await PROCESSES.gateway(gateway_config)
    await gateway.stop()
    assert not gateway._bus.is_connected
