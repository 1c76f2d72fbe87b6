"""All rejections by the gateway: status, error envelope, `param`, Retry-After."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from litestar.openapi.spec import OpenAPI

from services.gateway.dialects.openai.chat import ChatCompletionRequest, to_generation_request
from services.gateway.request import preparer
from services.gateway.request.preparer import MAX_INLINE_CHARS
from shared.config import GatewayConfig
from shared.messages import Failure, Finish, Served
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT, events_of, text_of
from tests.support.grids import in_one_test
from tests.support.waiting import LIMIT_S, until

USER = {"role": "user", "content": "x"}
CHUNKED_POST = b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


def check_envelope(response: httpx.Response, status: int, code: str, param: str | None) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    assert body["error"]["message"]


@in_one_test(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),  # by the template
        ({"messages": [{**USER, "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"model": 3}, "model"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"n": 129}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 0}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"seed": 1.5}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),  # by the template
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"logprobs": 0}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {"400": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words[0]"),
    ],
)
async def test_bad_field(cluster: Cluster, fields: dict[str, Any], param: str) -> None:
    response = await cluster.http.post(CHAT, json={**BODY, **fields})
    check_envelope(response, 400, "invalid_request", param)
    assert cluster.scheduler.submits.empty()


async def test_missing_body(cluster: Cluster) -> None:
    response = await cluster.http.post(CHAT)
    check_envelope(response, 400, "invalid_request", None)
    assert "empty" in response.json()["error"]["message"]


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nx: ", CHUNKED_POST + b"0\r\nx: "])
async def test_endless_head_or_trailer_closes_the_connection(
    cluster: Cluster, start: bytes
) -> None:
    url = httpx.URL(cluster.gateway.http_address)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(start)
    async with asyncio.timeout(LIMIT_S):
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and not writer.is_closing():
                writer.write(b"a" * 65536)
                await writer.drain()
                await asyncio.sleep(0)
    writer.close()
    assert (await cluster.http.get("/health")).status_code == 200


@pytest.mark.own_cluster
async def test_openapi_document_is_encoded_once_and_not_on_the_event_loop(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_schema, threads = OpenAPI.to_schema, set()

    def recorded(document: OpenAPI) -> dict[str, Any]:
        threads.add(threading.current_thread())
        return to_schema(document)

    monkeypatch.setattr(OpenAPI, "to_schema", None)
    assert (await cluster.http.get("/openapi.json")).status_code == 500
    monkeypatch.setattr(OpenAPI, "to_schema", recorded)
    page = await cluster.http.get("/docs/openapi.json")
    assert threading.main_thread() not in threads
    assert len(threads) == 1
    monkeypatch.setattr(OpenAPI, "to_schema", None)
    assert (await cluster.http.get("/docs/openapi.json")).content == page.content
    document = await cluster.http.get("/openapi.json")
    assert (document.status_code, document.content) == (200, page.content)
    assert document.headers["content-type"] == page.headers["content-type"] == "application/json"
    assert document.json()["info"]["title"] == "Hearth"


async def test_long_head_is_accepted(cluster: Cluster) -> None:
    response = await cluster.http.get("/health", headers={"x": "a" * 60_000})
    assert response.status_code == 200


async def test_many_empty_messages_are_a_long_prompt() -> None:
    body = {"messages": [{"role": "user", "content": ""}] * 1000}
    generation = to_generation_request(msgspec.convert(body, ChatCompletionRequest), "tiny")
    assert generation.prompt.num_chars > MAX_INLINE_CHARS


async def test_missing_field(cluster: Cluster) -> None:
    response = await cluster.http.post(CHAT, json={"model": "tiny"})
    check_envelope(response, 400, "invalid_request", "messages")


@pytest.mark.parametrize(
    "data",
    [
        b'{"temperature": NaN}',
        rb'{"messages": [{"role": "user", "content": "no digits: \ud8"}]}',
    ],
)
async def test_malformed_json(cluster: Cluster, data: bytes) -> None:
    response = await cluster.http.post(CHAT, content=data)
    check_envelope(response, 400, "invalid_request", None)


async def test_unknown_route_and_method(cluster: Cluster) -> None:
    check_envelope(await cluster.http.get("/v1/nothing"), 404, "not_found", None)
    wrong = await cluster.http.put(CHAT)
    check_envelope(wrong, 405, "method_not_allowed", None)
    assert "POST" in wrong.headers["allow"]


async def test_authentication(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.gateway.http_address) as keyless:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic eDp5"}):
            response = await keyless.get("/v1/models", headers=headers)
            check_envelope(response, 401, "invalid_api_key", None)
            assert response.json()["error"]["type"] == "authentication_error"


async def test_prompt_longer_than_the_context(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "x y " * 400}]
    response = await cluster.http.post(CHAT, json={**BODY, "messages": messages})
    check_envelope(response, 400, "context_length_exceeded", "messages")


async def test_chunked_body_too_large(cluster: Cluster) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(80):
            yield b"x" * 1024

    response = await cluster.http.post(CHAT, content=endless())
    assert "content-length" not in response.request.headers
    check_envelope(response, 413, "payload_too_large", None)


async def test_no_scheduler(cluster: Cluster) -> None:
    await cluster.scheduler.stop()
    await until(lambda: cluster.gateway.readiness().reason == "no live scheduler")
    assert (await cluster.http.get("/ready")).status_code == 503
    response = await cluster.http.post(CHAT, json=BODY)
    check_envelope(response, 503, "no_capacity", None)
    assert response.headers["retry-after"] == "1"


async def test_known_model_without_workers_lacks_capacity(cluster: Cluster) -> None:
    for decode in cluster.decodes:
        await decode.stop()
    cluster.scheduler.workers.clear()
    await until(lambda: cluster.gateway.readiness().reason == "no live decode worker")
    response = await cluster.http.post(CHAT, json=BODY)
    check_envelope(response, 503, "no_capacity", None)
    assert response.headers["retry-after"] == "3"


async def test_not_ready_without_free_blocks(cluster: Cluster) -> None:
    for decode in cluster.decodes:
        decode.num_free_blocks = 0
    await until(lambda: cluster.gateway.readiness().reason == "no decode worker has free blocks")
    assert (await cluster.http.get("/ready")).status_code == 503


async def test_failure_before_and_after_the_first_token(cluster: Cluster) -> None:
    failure = Failure(code="internal_error", message="the device is gone")
    finish = Finish(
        reason="failed",
        served=Served(num_cached_tokens=0, prefill_worker_id=None),
        failure=failure,
    )
    decode = cluster.decodes[0]
    decode.finish = finish
    decode.answer = decode.answer[:6]
    response = await cluster.http.post(CHAT, json=BODY)
    check_envelope(response, 500, "internal_error", None)
    events = await events_of(cluster)
    assert text_of(events[:-1])
    assert events[-1]["error"]["message"] == "the device is gone"
    decode.answer = []
    response = await cluster.http.post(CHAT, json={**BODY, "stream": True})
    check_envelope(response, 500, "internal_error", None)


async def test_too_many_requests_and_deadline(cluster: Cluster) -> None:
    cluster.decodes[0].hold_at = 0
    async with cluster.beside(max_requests=1, request_timeout_s=LIMIT_S) as beside:
        first = asyncio.create_task(beside.http.post(CHAT, json=BODY))
        await cluster.scheduler.submits.get()
        second = await beside.http.post(CHAT, json=BODY)
        check_envelope(second, 429, "overloaded", None)
        assert second.headers["retry-after"] == "1"
        (stream,) = beside.gateway._driver._streams._by_request.values()
        assert 0 < stream.deadline_at - time.monotonic() <= LIMIT_S
        stream.deadline_at = 0.0  # it is over
        check_envelope(await first, 504, "deadline_exceeded", None)
        assert (await cluster.decodes[0].aborts.get()).reason == "deadline"


async def test_prompts_in_preparation_count_as_open_requests(
    cluster: Cluster, gateway_config: GatewayConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.gateway.capacity, "_max_requests", 1)
    builder = cluster.gateway.preparer._builder
    build, is_preparing, may_end = builder.build, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow_build(*args: Any, **kwargs: Any) -> Any:
        loop.call_soon_threadsafe(is_preparing.set)
        assert may_end.wait(timeout=LIMIT_S)
        return build(*args, **kwargs)

    monkeypatch.setattr(builder, "build", slow_build)
    monkeypatch.setattr(preparer, "MAX_INLINE_TOKENS", 10)
    long = {"messages": [{"role": "user", "content": "x" * 101}]}
    first = asyncio.create_task(cluster.http.post(CHAT, json=long))
    await is_preparing.wait()
    second = asyncio.create_task(cluster.http.post(CHAT, json=long))
    try:
        done, _ = await asyncio.wait({second}, timeout=LIMIT_S / 2)
        assert done, "the request waits for a thread"
        check_envelope(second.result(), 429, "overloaded", None)
    finally:
        may_end.set()
        await asyncio.gather(first, second)


async def test_prompt_too_large_for_the_bus(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = cluster.gateway._bus
    monkeypatch.setattr(type(bus), "max_payload_bytes", 16 * 1024 + 100)
    response = await cluster.http.post(CHAT, json={**BODY, "max_tokens": 50})
    check_envelope(response, 400, "context_length_exceeded", "messages")
    assert cluster.scheduler.submits.empty()
