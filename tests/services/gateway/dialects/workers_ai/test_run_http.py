"""`ai/run` over HTTP: a running gateway, real servers, simulated peers on the bus."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from services.gateway.request import prepared_bodies
from shared.messages import Request
from shared.packing import unpack_token_ids
from tests.services.gateway.conftest import ANSWER, Cluster
from tests.services.gateway.peer import EMBEDDING

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi, what is a block hash?"}]
BODY: dict[str, Any] = {"messages": MESSAGES}
ROOT = "/client/v4/accounts/tenant-1/ai"
RUN = f"{ROOT}/run/tiny"


async def run(cluster: Cluster, body: Any = BODY, path: str = RUN, **fields: Any) -> Any:
    response = await cluster.http.post(path, json={**body, **fields})
    assert response.status_code == 200, response.text
    envelope = response.json()
    assert list(envelope) == ["result", "success", "errors", "messages"]
    assert (envelope["success"], envelope["errors"], envelope["messages"]) == (True, [], [])
    return envelope["result"]


async def frames_of(http: httpx.AsyncClient, body: Any, path: str = RUN) -> list[Any]:
    """Decoded events of one stream without the last, `[DONE]`."""
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream"
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def submitted(cluster: Cluster) -> Request:
    return (await cluster.scheduler.submits.get()).request


async def test_conversation(cluster: Cluster, model_files: Any) -> None:
    result = await run(cluster, seed=0, temperature=4.5)
    request = await submitted(cluster)
    num_prompt = len(unpack_token_ids(request.prompt_token_ids))
    num_output = len(model_files.tokenizer.encode([ANSWER]))
    assert result == {
        "response": ANSWER,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
        "finish_reason": "stop",
    }
    assert (request.tenant_id, request.model) == ("tenant-1", "tiny")
    assert (request.sampling.seed, request.sampling.temperature) == (0, 4.5)


async def test_stream_has_padding_and_one_usage(cluster: Cluster) -> None:
    *texts, last = await frames_of(cluster.http, {**BODY, "max_tokens": 3})
    assert "".join(each["response"] for each in texts) == ANSWER[: len("hello world,")]
    assert all(list(each) == ["response", "p"] for each in texts)
    assert list(last) == ["response", "usage", "finish_reason"]
    assert (last["response"], last["finish_reason"]) == ("", "length")
    assert last["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("root", ["/client/v4/accounts", "/accounts"])
async def test_spellings_of_the_path(cluster: Cluster, alias: str, root: str) -> None:
    encoded = alias.replace("/", "%2F")
    for name in ("tiny", alias, encoded, encoded.replace("@", "%40")):
        result = await run(cluster, path=f"{root}/tenant-1/ai/run/{name}")
        assert result["response"] == ANSWER
        assert (await submitted(cluster)).model == "tiny"


async def test_body_without_a_content_type(cluster: Cluster) -> None:
    """As in Cloudflare's examples with curl, which then claims a form."""
    for kind in ("application/x-www-form-urlencoded", "", "multipart/form-data"):
        headers = {"content-type": kind} if kind else {}
        response = await cluster.http.post(RUN, content=json.dumps(BODY), headers=headers)
        assert response.json()["result"]["response"] == ANSWER


async def test_max_tokens_by_default_and_where_the_context_ends(cluster: Cluster) -> None:
    await run(cluster)
    assert (await submitted(cluster)).sampling.max_tokens == 256
    await run(cluster, {"prompt": "x " * 200, "raw": True})
    request = await submitted(cluster)
    assert request.sampling.max_tokens == 512 - len(unpack_token_ids(request.prompt_token_ids))


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OPTIONS = {"seed": 11, "max_tokens": 40, "top_k": 5, "frequency_penalty": 0.5, "stop": "zz"}


@pytest.mark.parametrize("inline_bytes", [prepared_bodies.MAX_INLINE_BYTES, 1])
@pytest.mark.parametrize(
    ("body", "openai_path", "openai_body"),
    [
        (BODY, CHAT, BODY),
        ({"prompt": "hi"}, CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        ({"prompt": "hello 😀", "raw": True}, COMPLETIONS, {"prompt": "hello 😀"}),
    ],
)
async def test_same_request_as_over_openai(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    inline_bytes: int,
    body: Any,
    openai_path: str,
    openai_body: Any,
) -> None:
    """What workers get is the same, so the text is the same for the same seed."""
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", inline_bytes)
    result = await run(cluster, body, **OPTIONS)
    native = await submitted(cluster)
    response = await cluster.http.post(openai_path, json={**openai_body, **OPTIONS})
    choice = response.json()["choices"][0]
    theirs = await submitted(cluster)
    same = {"request_id": native.request_id, "deadline_s": native.deadline_s}
    assert msgspec.structs.replace(theirs, **same) == native
    text = choice["text"] if openai_path == COMPLETIONS else choice["message"]["content"]
    assert result["response"] == text
    frames = await frames_of(cluster.http, {**body, **OPTIONS})
    assert "".join(each["response"] for each in frames) == text


async def test_embeddings(cluster: Cluster) -> None:
    result = await run(cluster, {"text": ["a", "b"]})
    unit = pytest.approx([0.6, 0.0, -0.8, 0.0])
    assert result == {"shape": [2, 4], "data": [unit, unit], "pooling": "mean"}
    assert (await submitted(cluster)).pooling == "mean"
    result = await run(cluster, {"text": "a", "pooling": "last", "normalize": False})
    assert result == {"shape": [1, 4], "data": [list(EMBEDDING)], "pooling": "last"}


async def test_missing_embedding_is_an_error(cluster: Cluster) -> None:
    cluster.decodes[0].embedding = None
    response = await cluster.http.post(RUN, json={"text": "a"})
    assert response.status_code == 500
    assert [each["code"] for each in response.json()["errors"]] == [3043]


async def test_reject_if_busy(cluster: Cluster) -> None:
    await run(cluster, {**BODY, "options": {"rejectIfBusy": True}})
    assert not (await cluster.scheduler.submits.get()).is_queueable
    await run(cluster)
    assert (await cluster.scheduler.submits.get()).is_queueable


async def test_models_below_the_account(cluster: Cluster) -> None:
    for root in (f"{ROOT}/v1", "/accounts/tenant-1/ai/v1"):
        models = (await cluster.http.get(f"{root}/models")).json()
        assert models == (await cluster.http.get("/v1/models")).json()
        model = (await cluster.http.get(f"{root}/models/tiny")).json()
        assert model == models["data"][0]


async def test_no_padding(cluster: Cluster) -> None:
    async with cluster.beside(padding=False) as beside:
        *texts, _ = await frames_of(beside.http, BODY)
    assert "".join(each["response"] for each in texts) == ANSWER
    assert all(list(each) == ["response"] for each in texts)
