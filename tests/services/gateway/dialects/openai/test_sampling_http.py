"""Sampling options of a chat: from the request body to the wire, and their response."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from services.gateway.dialects.openai.chat import CHAT_FIELDS
from services.gateway.dialects.workers_ai.run_request import RUN_FIELDS
from services.gateway.request.supported_fields import SupportedFields
from services.gateway.text.model_files import ModelFiles
from shared.messages import AbortRequest
from tests.services.gateway.conftest import ANSWER, Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT, MESSAGES, events_of
from tests.support.waiting import LIMIT_S


async def post_chat(cluster: Cluster, **fields: Any) -> Any:
    response = await cluster.http.post(CHAT, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def choices_of(events: list[Any], index: int) -> list[Any]:
    chunks = [event["choices"] for event in events if event != "[DONE]"]
    return [each for choices in chunks for each in choices if each["index"] == index]


def text_of(events: list[Any], index: int) -> str:
    deltas = [choice["delta"] for choice in choices_of(events, index)]
    return "".join(delta.get("content", "") for delta in deltas)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": MESSAGES}, "max_tokens"),
        (CHAT, {"messages": MESSAGES}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "hello"}, "max_tokens"),
        ("/v1/responses", {"input": "hello"}, "max_output_tokens"),
        ("/accounts/tenant-1/ai/run/tiny", {"prompt": "hello"}, "max_tokens"),
    ],
)
async def test_limits_beyond_the_room_are_cut_to_it(
    cluster: Cluster, path: str, body: dict[str, Any], param: str
) -> None:
    """Agents send large ones to every model."""
    for limit in (32_000, 2**31, 10**30, 1e30):
        response = await cluster.http.post(path, json={**body, param: limit})
        assert response.status_code == 200, response.text
        assert f"{param}: {min(limit, 2**31 - 1)} is cut to " in response.text
        request = (await cluster.scheduler.submits.get()).request
        assert len(request.prompt_token_ids) // 4 + request.sampling.max_tokens == 512
    stream = await cluster.http.post(path, json={**body, param: 32_000, "stream": True})
    assert f"{param}: 32000 is cut to " in stream.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "top_k": 10**30}),
        ("/v1/messages", {"messages": MESSAGES, "model": "tiny", "max_tokens": 2**31}),
        (
            "/v1/messages",
            {
                **{"messages": MESSAGES, "model": "tiny", "max_tokens": 10**30, "top_k": 10**30},
                "thinking": {"type": "enabled", "budget_tokens": 2**31},
            },
        ),
    ],
)
async def test_other_limits_may_have_any_size(
    cluster: Cluster, path: str, body: dict[str, Any]
) -> None:
    response = await cluster.http.post(path, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("fields", [CHAT_FIELDS, RUN_FIELDS])
def test_budget_of_thinking_may_have_any_size(fields: SupportedFields) -> None:
    body = {"messages": MESSAGES, "thinking_token_budget": 10**30}
    assert fields.decode(json.dumps(body).encode()).thinking_token_budget == 2**31 - 1


async def test_sampling_on_the_wire(cluster: Cluster, model_files: ModelFiles) -> None:
    await post_chat(
        cluster,
        n=3,
        best_of=3,
        frequency_penalty=-2,
        presence_penalty=0.5,
        repetition_penalty=1.25,
        logit_bias={"7": -100, "8": 0.5},
        bad_words=["hello", " fox"],
        logprobs=True,
        top_logprobs=2,
        logprobs_mode="processed",
    )
    request = (await cluster.scheduler.submits.get()).request
    sampling = request.sampling
    assert [choice.choice_index for choice in request.choices] == [0, 1, 2]
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-2, 0.5)
    assert sampling.repetition_penalty == 1.25
    assert sampling.logit_bias == ((7, -100.0), (8, 0.5))
    encode = model_files.tokenizer.encode
    spelled = ["hello", " hello", "fox", " fox"]
    assert sampling.bad_words == tuple(tuple(encode([each])) for each in spelled)
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (2, None)
    assert sampling.logprobs_mode == "processed"


async def test_unset_sampling_options_are_off(cluster: Cluster) -> None:
    await post_chat(cluster, logprobs=False, top_logprobs=0, logit_bias=None, bad_words=[])
    sampling = (await cluster.scheduler.submits.get()).request.sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0, 0)
    assert (sampling.repetition_penalty, sampling.logit_bias, sampling.bad_words) == (1, (), ())
    assert sampling.num_logprobs is None


@pytest.mark.parametrize("is_stream", [False, True])
async def test_choices(cluster: Cluster, is_stream: bool) -> None:
    decode = cluster.decodes[0]
    decode.answers = {1: decode.answer[:3], 2: []}
    num_output = len(decode.answer) + 3
    expected = {0: ANSWER, 1: ANSWER[:12], 2: ""}
    if is_stream:
        events = await events_of(cluster, n=3, stream_options={"include_usage": True})
        assert {index: text_of(events, index) for index in expected} == expected
        for index in expected:
            sent = choices_of(events, index)
            assert [each["delta"].get("role") for each in sent] == ["assistant"] + [None] * (
                len(sent) - 1
            )
            assert [each["finish_reason"] for each in sent] == [None] * (len(sent) - 1) + ["stop"]
        usage = events[-2]["usage"]
    else:
        body = await post_chat(cluster, n=3)
        assert {each["index"]: each["message"]["content"] for each in body["choices"]} == expected
        usage = body["usage"]
    alone = (await post_chat(cluster))["usage"]
    assert usage["completion_tokens"] == num_output
    assert usage["prompt_tokens"] == alone["prompt_tokens"]
    assert usage["total_tokens"] == num_output + alone["prompt_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_stopped_choice_leaves_other_choices_running(cluster: Cluster) -> None:
    decode = cluster.decodes[0]
    decode.answers = {1: decode.answer[2:3] * 14}
    decode.hold_at = 12
    running = asyncio.create_task(post_chat(cluster, n=2, stop=["how are"]))
    async with asyncio.timeout(LIMIT_S):
        abort = await decode.aborts.get()
        assert (abort.reason, abort.choice_index) == ("stop", 0)
        assert not running.done()
        decode.released.set()
        body = await running
        placement_abort = await decode.aborts.get()
    texts = [each["message"]["content"] for each in body["choices"]]
    assert texts == ["hello world, ", "," * 14]
    assert placement_abort == AbortRequest(placement_id=abort.placement_id, reason="stop")


# ── logprobs ─────────────────────────────────────────────────────────────────────────────────────


def check_content(content: list[Any], text: str, num_top: int) -> None:
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == text
    for position, each in enumerate(content):
        assert each["logprob"] == pytest.approx(-1 - position / 64)
        tops = each["top_logprobs"]
        assert len(tops) == num_top
        if tops:
            assert (tops[0]["token"], tops[0]["bytes"]) == (each["token"], each["bytes"])
            assert [top["logprob"] for top in tops] == [each["logprob"], *[-9999.0] * (num_top - 1)]


@pytest.mark.parametrize("num_top", [None, 0, 3])
async def test_logprobs_without_streaming(cluster: Cluster, num_top: int | None) -> None:
    fields = {} if num_top is None else {"top_logprobs": num_top}
    body = await post_chat(cluster, logprobs=True, **fields)
    (choice,) = body["choices"]
    assert choice["logprobs"]["refusal"] is None
    content = choice["logprobs"]["content"]
    check_content(content, ANSWER, num_top or 0)
    assert len(content) == body["usage"]["completion_tokens"]


async def test_logprobs_are_in_the_chunk_of_their_text(cluster: Cluster) -> None:
    """The tokens of each chunk spell its text, even if a character has several tokens."""
    events = await events_of(cluster, logprobs=True, top_logprobs=1)
    chunks = [each for each in choices_of(events, 0) if each["logprobs"] is not None]
    content = [entry for each in chunks for entry in each["logprobs"]["content"]]
    check_content(content, ANSWER, 1)
    for chunk in chunks:
        spelled = b"".join(bytes(each["bytes"]) for each in chunk["logprobs"]["content"])
        assert spelled.decode() == chunk["delta"]["content"]
    split = [each["token"] for each in content if each["token"].startswith("\\x")]
    assert split[:4] == ["\\xf0", "\\x9f", "\\x98", "\\x80"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_no_logprobs_after_a_stop_match(cluster: Cluster, is_stream: bool) -> None:
    decode = cluster.decodes[0]
    decode.hold_at = len(decode.answer)
    fields = {"logprobs": True, "stop": ["are you? 😀"]}
    if is_stream:
        events = await events_of(cluster, **fields, stream_options={"include_usage": True})
        usage = events[-2]["usage"]
        chunks = [each for each in choices_of(events, 0) if each["logprobs"] is not None]
        content = [entry for each in chunks for entry in each["logprobs"]["content"]]
        text = text_of(events, 0)
    else:
        body = await post_chat(cluster, **fields)
        usage, (choice,) = body["usage"], body["choices"]
        content, text = choice["logprobs"]["content"], choice["message"]["content"]
    assert text == "hello world, how "
    check_content(content, "hello world, how are you? 😀", 0)
    assert len(content) == usage["completion_tokens"]


async def test_missing_logprobs_fail_the_request(cluster: Cluster) -> None:
    decode = cluster.decodes[0]
    decode.tells_logprobs = False
    response = await cluster.http.post(CHAT, json={**BODY, "logprobs": True})
    assert response.status_code == 500
    assert "logprobs" in response.json()["error"]["message"]
    assert (await decode.aborts.get()).reason == "failed"


async def test_openai_sdk_parses_choices_and_logprobs(cluster: Cluster) -> None:
    async with cluster.openai as client:
        answer = await client.chat.completions.create(  # type: ignore[call-overload]
            model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2
        )
    assert [choice.message.content for choice in answer.choices] == [ANSWER, ANSWER]
    entry = answer.choices[1].logprobs.content[0]
    assert (entry.token, len(entry.top_logprobs)) == ("hello", 2)
