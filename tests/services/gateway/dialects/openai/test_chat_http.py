"""The chat endpoint over HTTP: a running gateway, real servers, simulated peers on the bus."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client import CONTENT_TYPE_LATEST

from shared.packing import unpack_hashes, unpack_token_ids
from tests.services.gateway.conftest import ANSWER, Cluster
from tests.services.gateway.peer import CARD
from tests.support.waiting import LIMIT_S, until

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi, what is a block hash?"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": MESSAGES}
CHAT = "/v1/chat/completions"


async def events_of(cluster: Cluster, **fields: Any) -> list[Any]:
    """Decoded `data:` payloads of one streamed chat; `[DONE]` stays a string."""
    body = {**BODY, "stream": True, **fields}
    async with cluster.http.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream"
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def text_of(events: list[Any]) -> str:
    chunks = [event for event in events if event != "[DONE]" and event.get("choices")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_unstreamed_response(cluster: Cluster, model_files: Any) -> None:
    response = await cluster.http.post(CHAT, json=BODY)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    num_output = len(model_files.tokenizer.encode([ANSWER]))
    assert body["usage"]["completion_tokens"] == num_output
    assert body["usage"]["total_tokens"] == num_output + body["usage"]["prompt_tokens"]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    request_id = response.headers["x-request-id"]
    assert body["hearth"] == {
        "request_id": request_id,
        "decode_worker": "decode-1",
        "prefill_worker": "prefill-1",
        "num_pushed_tokens": 7,
        "num_preemptions": 0,
        "num_resubmissions": 0,
    }
    assert await cluster.decodes[0].acks.get()


async def test_request_on_the_wire(cluster: Cluster, model_files: Any) -> None:
    body = {**BODY, "temperature": 0, "top_k": 0, "seed": 0, "max_tokens": 3, "cache_salt": "s"}
    response = await cluster.http.post(CHAT, json=body)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    request = (await cluster.scheduler.submits.get()).request
    assert (request.tenant_id, request.gateway_id, request.model) == (
        "tenant-1",
        "gateway-1",
        "tiny",
    )
    assert request.request_id == response.headers["x-request-id"]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.max_tokens) == (
        0,
        0,
        0,
        3,
    )
    assert sampling.stop_token_ids == (2, 0)  # from generation_config.json
    prompt = model_files.tokenizer.tokenizer.decode(
        unpack_token_ids(request.prompt_token_ids), skip_special_tokens=False
    )
    assert prompt == (
        f"<|im_start|>user\n{MESSAGES[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    )
    num_tokens = len(unpack_token_ids(request.prompt_token_ids))
    assert len(unpack_hashes(request.block_hashes)) == num_tokens // CARD.block_size
    assert 0 < request.deadline_s <= 600


async def test_cache_salt_changes_the_cache_root(cluster: Cluster) -> None:
    roots = set()
    for salt in ("a", "b", None):
        await cluster.http.post(CHAT, json={**BODY, "cache_salt": salt, "max_tokens": 1})
        roots.add((await cluster.scheduler.submits.get()).request.cache_root)
    assert len(roots) == 3


async def test_sampling_defaults_are_those_of_the_model(cluster: Cluster) -> None:
    await cluster.http.post(CHAT, json=BODY)
    sampling = (await cluster.scheduler.submits.get()).request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 1.0, 0)
    assert sampling.max_tokens < CARD.max_context_tokens


async def test_stream(cluster: Cluster) -> None:
    events = await events_of(cluster, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    deltas = [event["choices"][0]["delta"] for event in events[:-2]]
    assert deltas[0]["role"] == "assistant" and deltas[0]["content"]
    assert not any("role" in delta for delta in deltas[1:])
    assert text_of(events) == ANSWER
    assert "\ufffd" not in text_of(events)
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert events[-2]["choices"] == []
    assert all(event["usage"] is None for event in events[:-2])
    assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert events[-2]["hearth"]["decode_worker"] == "decode-1"
    assert len({event["id"] for event in events[:-1]}) == 1


RUNNING = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_usage_so_far_in_each_chunk(cluster: Cluster, num_choices: int) -> None:
    events = await events_of(cluster, stream_options=RUNNING, n=num_choices)
    usages = [event["usage"] for event in events[:-1]]
    outputs = [each["completion_tokens"] for each in usages]
    assert outputs == sorted(outputs) and outputs[0] > 0
    assert {each["prompt_tokens"] for each in usages} == {usages[-1]["prompt_tokens"]}
    assert text_of([each for each in events if each == "[DONE]" or not _of_others(each)]) == ANSWER
    plain = await events_of(cluster, stream_options={"include_usage": True}, n=num_choices)
    assert plain[-2]["usage"]["completion_tokens"] == outputs[-1]


def _of_others(event: dict[str, Any]) -> bool:
    return any(each["index"] for each in event["choices"])


@pytest.mark.parametrize(
    "options",
    [None, {}, {"include_usage": None}, {"include_usage": False}, {"continuous_usage_stats": True}],
)
async def test_stream_without_usage(cluster: Cluster, options: Any) -> None:
    events = await events_of(cluster, stream_options=options)
    assert not any("usage" in event for event in events[:-1])


async def test_openai_sdk(cluster: Cluster) -> None:
    async with cluster.openai as client:
        full = await client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[call-overload]
        assert full.choices[0].message.content == ANSWER
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
        assert text == ANSWER
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 4
        assert [model.id async for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_stop_string_across_token_boundaries(cluster: Cluster, is_stream: bool) -> None:
    cluster.decodes[0].hold_at = len(cluster.decodes[0].answer)  # never ends by itself
    fields = {"stop": ["are you? 😀", "zzz"]}
    if is_stream:
        events = await events_of(cluster, **fields, stream_options={"include_usage": True})
        text, usage = text_of(events), events[-2]["usage"]
        reason = events[-3]["choices"][0]["finish_reason"]
    else:
        body = (await cluster.http.post(CHAT, json={**BODY, **fields})).json()
        text, usage = body["choices"][0]["message"]["content"], body["usage"]
        reason = body["choices"][0]["finish_reason"]
    assert text == "hello world, how "
    assert reason == "stop"
    abort = await cluster.decodes[0].aborts.get()
    assert abort.reason == "stop"
    assert 0 < usage["completion_tokens"] < len(cluster.decodes[0].answer)


async def test_partial_stop_match_is_sent_at_the_end(cluster: Cluster) -> None:
    events = await events_of(cluster, stop="brown fox jumps")
    assert text_of(events) == ANSWER


async def test_message_forms(cluster: Cluster) -> None:
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}],
        },
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "again"},
    ]
    body = {**BODY, "messages": messages, "metadata": {"a": "b"}, "store": True, "user": "u"}
    neutral = {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False}
    response = await cluster.http.post(CHAT, json={**body, **neutral, "tools": []})
    assert response.status_code == 200, response.text


@pytest.mark.own_cluster
async def test_models_health_ready_metrics_openapi(cluster: Cluster) -> None:
    models = (await cluster.http.get("/v1/models")).json()
    assert models["object"] == "list"
    assert models["data"][0]["id"] == "tiny"
    assert models["data"][0]["max_context"] == CARD.max_context_tokens
    of_codex = (await cluster.http.get("/v1/models?client_version=0.153.4")).json()
    assert of_codex == {**models, "models": []}
    assert (await cluster.http.get("/health")).json() == {"status": "ok"}
    ready = await cluster.http.get("/ready")
    assert ready.status_code == 200
    assert ready.json() == {"ready": True, "reason": None, "redis": "ok"}
    await cluster.http.post(CHAT, json=BODY)
    response = await cluster.http.get("/metrics")
    assert response.headers["content-type"] == CONTENT_TYPE_LATEST
    metrics = response.text
    labels = 'dialect="openai",model="tiny",outcome="stop",tenant="tenant-1"'
    assert f"hearth_requests_total{{{labels}}} 1.0" in metrics
    assert 'hearth_time_to_first_token_seconds_count{model="tiny"} 1.0' in metrics
    assert 'hearth_gateway_open_streams{gateway="gateway-1"} 0.0' in metrics
    assert 'hearth_process_live{process="decode-1",role="decode"} 1.0' in metrics
    vllm = (await cluster.http.get("/metrics", params={"names": "vllm"})).text
    labels = 'engine="gateway-1",finished_reason="stop",model_name="tiny"'
    assert f"vllm:request_success_total{{{labels}}} 1.0" in vllm
    assert 'vllm:num_requests_running{engine="decode-1",model_name="tiny"}' in vllm
    response = await cluster.http.get("/metrics", params={"names": "sglang"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "names")
    document = (await cluster.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    name = next(name for name in schemas if name.endswith("ChatCompletionRequest"))
    assert "max_completion_tokens" in schemas[name]["properties"]
    assert "logit_bias" in schemas[name]["properties"]
    assert {CHAT, "/v1/completions", "/v1/embeddings"} <= set(document["paths"])
    assert "409" in document["paths"]["/v1/prefixes/{name}"]["put"]["responses"]
    (scheme,) = document["components"]["securitySchemes"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            without_key = ("/health", "/ready", "/version", "/v1/receipts/keys")
            needs_key = path not in without_key
            secured = [{scheme: []}] if needs_key else None
            assert operation.get("security") == secured, path


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/health", "/ready", "/metrics"])
async def test_head_is_get_without_a_body(cluster: Cluster, path: str) -> None:
    head, full = await cluster.http.head(path), await cluster.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == full.headers["content-type"]


async def test_model_by_id(cluster: Cluster) -> None:
    (entry,) = (await cluster.http.get("/v1/models")).json()["data"]
    assert (await cluster.http.get("/v1/models/tiny")).json() == entry
    missing = await cluster.http.get("/v1/models/org/huge")
    assert missing.status_code == 404
    error = missing.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "org/huge" in error["message"]
    async with cluster.openai as client:
        assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_concurrent_streams_do_not_mix(cluster: Cluster) -> None:
    answers = await asyncio.gather(*(events_of(cluster, seed=index) for index in range(32)))
    assert [text_of(events) for events in answers] == [ANSWER] * 32


async def test_model_field_is_optional(cluster: Cluster) -> None:
    response = await cluster.http.post(CHAT, json={"messages": MESSAGES})
    assert response.json()["model"] == "tiny"


@pytest.mark.own_cluster
async def test_drain_finishes_running_requests(cluster: Cluster) -> None:
    cluster.decodes[0].hold_at = 5
    running = asyncio.create_task(events_of(cluster))
    while (await cluster.decodes[0].emitted.get()).first_position < 4:
        pass
    draining = asyncio.create_task(cluster.gateway.drain())
    await until(lambda: cluster.gateway.capacity.is_draining)
    rejected = await cluster.http.post(CHAT, json=BODY)
    assert rejected.status_code == 503
    assert rejected.headers["retry-after"] == "1"
    assert (await cluster.http.get("/ready")).json()["reason"] == "draining"
    assert not draining.done()
    cluster.decodes[0].released.set()
    assert text_of(await running) == ANSWER
    async with asyncio.timeout(LIMIT_S):
        await draining
