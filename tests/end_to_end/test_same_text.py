"""One prompt and seed give one text over every API, streamed or not."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from services.client.hearth_nats import HearthClient
from tests.support.cluster.hearth_up import Cluster

SOME, MANY = 12, 200
AT_ONCE = 16
TENANT = "default"
WORDS = ("cache", "token", "prefix", "worker", "block", "gateway", "queue", "model", "stream")

Send = Callable[[dict[str, Any]], Awaitable[str]]


def bodies(count: int) -> list[dict[str, Any]]:
    """Conversations and plain prompts; every other one is streamed."""
    return [_body(random.Random(number), number) for number in range(count)]


def _body(rng: random.Random, number: int) -> dict[str, Any]:
    text = f"{number}: {' '.join(rng.choices(WORDS, k=rng.randrange(2, 60)))}?"
    options = {"seed": number, "temperature": 1.2, "max_tokens": 12, "stream": number % 2 == 0}
    if number % 3 == 0:
        return {"prompt": text, **options}
    return {"messages": [{"role": "user", "content": text}], **options}


@pytest.mark.parametrize("count", [SOME, pytest.param(MANY, marks=pytest.mark.long)])
async def test_the_same_prompts_give_the_same_text_over_all_apis(
    cluster: Cluster, count: int
) -> None:
    prompts = bodies(count)
    headers = {"authorization": f"Bearer {cluster.state.api_key}"}
    client = next(each for each in cluster.state.credentials if each.role == "client")
    nats = await HearthClient.connect(
        client.nats_url(cluster.state.nats_host, cluster.state.nats_port)
    )
    run = f"/client/v4/accounts/{TENANT}/ai/run/{cluster.model}"
    async with httpx.AsyncClient(base_url=cluster.url, headers=headers, timeout=60) as http:
        try:
            openai = await texts(prompts, lambda body: over_openai(http, body))
            workers_ai = await texts(prompts, lambda body: over_workers_ai(http, run, body))
            over_bus = await texts(prompts, lambda body: over_nats(nats, body))
        finally:
            await nats.close()
    assert len(set(openai)) > count / 2, "the prompts hardly matter"
    assert workers_ai == openai
    assert over_bus == openai


async def texts(prompts: list[dict[str, Any]], send: Send) -> list[str]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(body: dict[str, Any]) -> str:
        async with slots:
            return await send(body)

    return await asyncio.gather(*(one(body) for body in prompts))


async def over_openai(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = (await http.post(path, json=body)).raise_for_status()
    if not body["stream"]:
        return text_of(response.json())
    return "".join(text_of(event) for event in sse(response.text))


async def over_workers_ai(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    response = (await http.post(path, json={**body, "raw": "prompt" in body})).raise_for_status()
    if not body["stream"]:
        return response.json()["result"]["response"]
    return "".join(event["response"] for event in sse(response.text))


async def over_nats(nats: HearthClient, body: dict[str, Any]) -> str:
    endpoint = "chat" if "messages" in body else "completions"
    if not body["stream"]:
        return text_of(await nats.request(endpoint, body))
    return "".join([text_of(event) async for event in nats.stream(endpoint, body)])


def sse(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(body: dict[str, Any]) -> str:
    (choice,) = body["choices"]
    message = choice.get("message") or choice.get("delta") or choice
    return message.get("content") or message.get("text") or ""
