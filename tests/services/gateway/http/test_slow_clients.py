"""Clients that do not read, and silent streams, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI

from services.gateway.service import GatewayService
from shared.clock import MonotonicClock
from shared.errors import HearthError
from shared.store import RedisStore
from shared.tenancy.tenant_admin import TenantAdmin
from tests.services.gateway.conftest import ANSWER, Beside, Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT
from tests.services.gateway.dialects.openai.test_refusals import check_envelope
from tests.services.gateway.samples import sample_sum
from tests.support.waiting import LIMIT_S, until

KEY = "key-of-acme"
RECEIVE_BYTES = 4096
NUM_TOKENS = 400
LARGE = {**BODY, "logprobs": True, "top_logprobs": 20, "max_tokens": NUM_TOKENS}  # 430 KB


@contextlib.asynccontextmanager
async def gateway_of(cluster: Cluster, **changes: Any) -> AsyncIterator[Beside]:
    """A gateway whose tenant `acme` may have one request open."""
    async with cluster.beside(**changes) as beside:
        store = RedisStore(beside.gateway._config.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
        # 2 s, not 50 ms: a busy machine makes Redis look unavailable
        beside.gateway.api_keys._stores = (store,)
        beside.gateway._limits._store = store
        await store.write([("FLUSHALL",)])
        await TenantAdmin(store, lambda: 1.7e9).add("acme", {"concurrency": 1}, KEY)
        beside.http.headers["authorization"] = f"Bearer {KEY}"
        for decode in cluster.decodes:
            decode.answer = (cluster.answer * NUM_TOKENS)[:NUM_TOKENS]
        yield beside
        await store.close()


def connect(beside: Beside, body: dict[str, Any]) -> socket.socket:
    """Sends a chat request on a connection with a small receive buffer, and reads nothing."""
    url = httpx.URL(beside.gateway.http_address)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    client.connect((url.host, url.port))
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    client.setblocking(False)
    return client


def lose_patience(gateway: GatewayService) -> None:
    """Ends the write timeout of the clients that do not read now."""
    for each in gateway._web_server._server.server_state.connections:
        connection = each._connection  # type: ignore[union-attr]
        if connection._timer is not None:
            connection._timeout_s = 0.0
            connection._check()


@pytest.mark.parametrize("stream", [False, True])
async def test_unread_response_holds_its_lease_until_it_is_closed(
    cluster: Cluster, stream: bool
) -> None:
    async with gateway_of(cluster, write_timeout_s=LIMIT_S) as beside:
        gateway = beside.gateway
        client = connect(beside, {**LARGE, "stream": stream})
        await cluster.scheduler.submits.get()
        await until(lambda: not len(gateway._driver))  # all tokens are generated
        check_envelope(await beside.http.post(CHAT, json=BODY), 429, "concurrency_exceeded", None)
        assert gateway.submission._unsent.num_bytes("acme") > 20_000
        lose_patience(gateway)
        await until(lambda: not gateway._limits.num_open)
        assert sample_sum(beside.gateway, "hearth_slow_clients_total") == 1
        assert gateway.submission._unsent.num_bytes("acme") == 0
        with pytest.raises(ConnectionResetError):  # an end would look like a complete answer
            while await asyncio.get_running_loop().sock_recv(client, 1 << 16):
                pass
        client.close()
        response = await beside.http.post(CHAT, json=LARGE)
        (choice,) = response.json()["choices"]
        assert len(choice["logprobs"]["content"]) == NUM_TOKENS
        assert len(response.content) > 400_000


async def test_running_request_of_a_client_that_does_not_read_is_aborted(cluster: Cluster) -> None:
    async with gateway_of(cluster, write_timeout_s=0.5) as beside:
        decode = cluster.decodes[0]
        decode.hold_at = NUM_TOKENS - 1
        client = connect(beside, {**LARGE, "stream": True})
        async with asyncio.timeout(LIMIT_S):
            assert (await decode.aborts.get()).reason == "client_gone"
        await until(lambda: not beside.gateway._limits.num_open)
        assert sample_sum(beside.gateway, "hearth_requests_total", outcome="client_slow") == 1
        client.close()


async def test_backlog_is_sent_in_parts_to_a_client_that_reads_late(cluster: Cluster) -> None:
    async with gateway_of(cluster) as beside:
        client = connect(beside, {**LARGE, "stream": True, "n": 2})
        await cluster.scheduler.submits.get()
        await until(lambda: not len(beside.gateway._driver))
        received = b""
        async with asyncio.timeout(LIMIT_S):
            while b"[DONE]" not in received:
                received += await asyncio.get_running_loop().sock_recv(client, 1 << 16)
        client.close()
        lines = [each for each in received.split(b"\n") if each.startswith(b"data: {")]
        chunks = [json.loads(each.strip()[6:])["choices"][0] for each in lines]
        for index in (0, 1):
            own = [each for each in chunks if each["index"] == index]
            listed = [token for each in own for token in (each["logprobs"] or {})["content"]]
            text = "".join(each["delta"].get("content", "") for each in own)
            assert len(listed) == NUM_TOKENS
            assert (
                b"".join(bytes(token["bytes"]) for token in listed).decode(errors="replace") == text
            )
            assert max(len(each["logprobs"]["content"]) for each in own) <= 64
            assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["length"]


async def test_client_library_ignores_comments(cluster: Cluster) -> None:
    """The worker is silent until the client has the head, which only a comment's time sends."""
    async with gateway_of(cluster, keep_alive_s=0.05) as beside:
        decode = cluster.decodes[0]
        decode.answer, decode.hold_at = cluster.answer, 0
        url = f"{beside.gateway.http_address}/v1"
        async with AsyncOpenAI(api_key=KEY, base_url=url, max_retries=0) as client:
            stream = await client.chat.completions.create(**BODY, stream=True)
            assert stream.response.headers["x-accel-buffering"] == "no"
            decode.released.set()
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(texts) == ANSWER
            await until(lambda: not beside.gateway._limits.num_open)

            decode.released.clear()
            stream = await client.chat.completions.create(**BODY, stream=True)
            (request_id,) = beside.gateway._driver._streams.request_ids()
            beside.gateway._driver.close(request_id, "failed", HearthError("broken"))
            with pytest.raises(APIError, match="broken"):
                async for _ in stream:
                    pass
