"""Text completions over HTTP: a running gateway, real servers, simulated peers on the bus."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from services.gateway.dialects.openai import completion_response
from services.gateway.request import preparer
from services.gateway.request.preparer import MAX_INLINE_ECHO
from services.gateway.request.request_builder import PreparedRequest
from services.gateway.text.model_files import ModelFiles
from shared.errors import Overloaded
from shared.messages import TokenEntry
from shared.packing import unpack_token_ids
from tests.services.gateway.conftest import ANSWER, Cluster
from tests.services.gateway.dialects.openai.test_refusals import check_envelope
from tests.support.grids import in_one_test
from tests.support.waiting import LIMIT_S, until

ROUTE = "/v1/completions"
PROMPT = "the lazy 東"
TEXT = "hello world, how are you?"


async def complete(cluster: Cluster, prompt: Any = PROMPT, **fields: Any) -> Any:
    response = await cluster.http.post(ROUTE, json={"prompt": prompt, "max_tokens": 99, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def events_of(cluster: Cluster, **fields: Any) -> list[Any]:
    body = {"prompt": PROMPT, "max_tokens": 99, "stream": True, **fields}
    async with cluster.http.stream("POST", ROUTE, json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def prompts_sent(cluster: Cluster) -> list[list[int]]:
    submits = [
        cluster.scheduler.submits.get_nowait() for _ in range(cluster.scheduler.submits.qsize())
    ]
    return [unpack_token_ids(each.request.prompt_token_ids) for each in submits]


async def test_unstreamed_response(cluster: Cluster, model_files: ModelFiles) -> None:
    body = await complete(cluster)
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["id"] == f"cmpl-{body['hearth']['request_id']}"
    choice = {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [choice]
    prompt = model_files.tokenizer.encode([PROMPT])
    assert await prompts_sent(cluster) == [prompt]
    assert body["usage"]["prompt_tokens"] == len(prompt)


async def test_default_max_tokens_is_16(cluster: Cluster) -> None:
    response = await cluster.http.post(ROUTE, json={"prompt": PROMPT})
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 16


async def test_stream(cluster: Cluster) -> None:
    events = await events_of(cluster, stream_options={"include_usage": True})
    *chunks, usage = events
    assert "".join(each["choices"][0]["text"] for each in chunks) == ANSWER
    assert [each["choices"][0]["finish_reason"] for each in chunks[-2:]] == [None, "stop"]
    assert {each["object"] for each in events} == {"text_completion"}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 16
    assert all(each["usage"] is None for each in chunks)
    running = {"include_usage": True, "continuous_usage_stats": True}
    for echo in (False, True):
        *chunks, last = await events_of(cluster, stream_options=running, echo=echo)
        assert chunks[-1]["usage"] == last["usage"]
        shown = "".join(each["choices"][0]["text"] for each in chunks)
        assert shown.endswith(ANSWER) and (shown == ANSWER) is not echo
        assert all(each["usage"]["prompt_tokens"] for each in chunks)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_several_prompts_with_several_choices(cluster: Cluster, is_stream: bool) -> None:
    cluster.decodes[0].answers = {1: cluster.decodes[0].answer[:3]}
    fields = {"prompt": ["a", "b c", "d"], "n": 2}
    texts = dict.fromkeys(range(6), "")
    if is_stream:
        for event in await events_of(cluster, **fields):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        body = await complete(cluster, **fields)
        texts = {each["index"]: each["text"] for each in body["choices"]}
        num_prompt = sum(map(len, await prompts_sent(cluster)))
        assert body["usage"]["prompt_tokens"] == num_prompt
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": num_prompt}
        assert body["hearth"]["num_pushed_tokens"] == 21
    assert list(texts.values()) == [ANSWER, "hello world,"] * 3


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_prompt_of_token_ids(cluster: Cluster, prompt: Any) -> None:
    assert (await complete(cluster, prompt))["choices"][0]["text"] == ANSWER
    assert await prompts_sent(cluster) == [[5, 6, 7]]


async def test_special_tokens_in_a_text_prompt_are_encoded(cluster: Cluster) -> None:
    await complete(cluster, "<|im_start|>x")
    assert (await prompts_sent(cluster))[0][0] == 1


@pytest.mark.parametrize(
    ("prompt", "status", "code"),
    [
        (["fine", "x y " * 400, "fine"], 400, "context_length_exceeded"),
        (["fine", "", "fine"], 400, "invalid_request"),
        ([[5], [], [5]], 400, "invalid_request"),
        ([[5], [400], [5]], 400, "invalid_request"),
    ],
)
async def test_rejected_prompt_is_named_and_none_is_submitted(
    cluster: Cluster, prompt: list[Any], status: int, code: str
) -> None:
    response = await cluster.http.post(ROUTE, json={"prompt": prompt, "max_tokens": 5})
    check_envelope(response, status, code, "prompt[1]")
    assert "prompt[1]" in response.json()["error"]["message"]
    assert len(cluster.gateway._driver) == 0
    assert cluster.scheduler.submits.empty()


async def test_failure_of_one_prompt_ends_the_request(cluster: Cluster) -> None:
    decode = cluster.decodes[0]
    decode.hold_at = 3
    running = asyncio.create_task(
        cluster.http.post(ROUTE, json={"prompt": ["a", "b"], "max_tokens": 50})
    )
    await cluster.scheduler.submits.get()
    request = (await cluster.scheduler.submits.get()).request
    driver = cluster.gateway._driver
    await until(lambda: len(driver._streams._by_placement) == 2)
    async with asyncio.timeout(LIMIT_S):
        driver.close(request.request_id, "failed", Overloaded("too much"))
        check_envelope(await running, 429, "overloaded", None)
        reasons = {(await decode.aborts.get()).reason for _ in range(2)}
    assert reasons == {"failed", "client_gone"}


# ── best_of, echo, logprobs ──────────────────────────────────────────────────────────────────────


async def test_best_of_returns_the_highest_mean_logprobs(cluster: Cluster) -> None:
    """The peer gives later choices higher logprobs; a choice is ranked by its mean per token."""
    decode = cluster.decodes[0]
    decode.answers = {index: decode.answer[: index + 1] for index in range(3)}
    body = await complete(cluster, ["a", "b"], n=2, best_of=3)
    texts = [each["text"] for each in body["choices"]]
    assert texts == ["hello world,", "hello world"] * 2
    assert [each["index"] for each in body["choices"]] == [0, 1, 2, 3]
    assert all(each["logprobs"] is None for each in body["choices"])
    assert body["usage"]["completion_tokens"] == 2 * (1 + 2 + 3)
    sampling = (await cluster.scheduler.submits.get()).request.sampling
    assert sampling.num_logprobs == 0


@pytest.mark.parametrize("is_stream", [False, True])
async def test_echo(cluster: Cluster, is_stream: bool) -> None:
    if is_stream:
        events = await events_of(cluster, echo=True, n=2)
        texts = dict.fromkeys(range(2), "")
        for event in events:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        choices = (await complete(cluster, echo=True, n=2))["choices"]
        texts = {each["index"]: each["text"] for each in choices}
    assert texts == {0: PROMPT + ANSWER, 1: PROMPT + ANSWER}
    assert (await cluster.scheduler.submits.get()).request.sampling.num_prompt_logprobs is None


def check_logprobs(logprobs: Any, text: str, num_prompt_tokens: int) -> None:
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert {len(each) for each in logprobs.values()} == {len(tokens)}
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    place = 0
    for token in tokens:
        spelled = token.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")
        spelled = spelled if token.startswith("bytes:") else token.encode()
        assert text.encode()[place:].startswith(spelled)
        place += len(spelled)
    assert place == len(text.encode())
    is_prompt = num_prompt_tokens > 0
    assert (logprobs["token_logprobs"][0] is None) == is_prompt
    assert (logprobs["top_logprobs"][0] is None) == is_prompt
    assert logprobs["token_logprobs"][num_prompt_tokens] == -1
    assert all(each <= -1 for each in logprobs["token_logprobs"][1:])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("has_echo", [False, True])
async def test_logprobs(
    cluster: Cluster,
    model_files: ModelFiles,
    has_echo: bool,
    is_stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt is streamed in parts."""
    monkeypatch.setattr(completion_response, "ECHO_TOKENS", 2)
    fields = {"echo": has_echo, "logprobs": 2}
    if is_stream:
        sent_choices = [each["choices"][0] for each in await events_of(cluster, **fields)]
        parts = [each["logprobs"] for each in sent_choices if each["logprobs"] is not None]
        logprobs = {key: [x for part in parts for x in part[key]] for key in parts[0]}
        assert "".join(each["text"] for each in sent_choices) == has_echo * PROMPT + ANSWER
        assert not has_echo or [len(part["tokens"]) for part in parts[:2]] == [2, 2]
    else:
        (choice,) = (await complete(cluster, **fields))["choices"]
        logprobs = choice["logprobs"]
    num_prompt = len(model_files.tokenizer.encode([PROMPT])) if has_echo else 0
    check_logprobs(logprobs, (PROMPT if has_echo else "") + ANSWER, num_prompt)
    assert list(logprobs["top_logprobs"][-1].values())[1:] == [-9999.0]


async def test_no_choice_is_sent_before_prompt_logprobs(cluster: Cluster) -> None:
    """The first message of choice 1 contains the prompt logprobs, and is lost."""
    lost: list[int] = []

    def loses(entry: TokenEntry) -> bool:
        if entry.choice_index == 0 or entry.first_position > 0 or lost:
            return False
        lost.append(entry.choice_index)
        return True

    cluster.decodes[0].loses = loses
    events = await events_of(cluster, echo=True, logprobs=0, n=2)
    assert lost
    for index in range(2):
        sent_choices = (each["choices"][0] for each in events)
        first = next(each for each in sent_choices if each["index"] == index)
        assert first["text"].startswith(PROMPT)
        assert first["logprobs"]["token_logprobs"][:2] == [None, -1 - 1 / 64]


async def test_echo_of_zero_tokens_scores_only_the_prompt(cluster: Cluster) -> None:
    body = await complete(cluster, echo=True, logprobs=0, max_tokens=0)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 0
    sampling = (await cluster.scheduler.submits.get()).request.sampling
    assert (sampling.max_tokens, sampling.num_prompt_logprobs) == (1, 0)
    (event,) = await events_of(cluster, echo=True, max_tokens=0)
    (choice,) = event["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")


async def test_prompt_of_token_ids_is_echoed_as_text(cluster: Cluster) -> None:
    (choice,) = (await complete(cluster, [1, 260, 261], echo=True, logprobs=0))["choices"]
    assert choice["text"].startswith("<|im_start|>")
    assert choice["logprobs"]["text_offset"][:2] == [0, len("<|im_start|>")]
    assert choice["logprobs"]["tokens"][0] == "<|im_start|>"


@pytest.mark.parametrize(
    ("num_tokens", "echo", "is_inline"),
    [(MAX_INLINE_ECHO, True, True), (65, True, False), (65, False, True), (101, False, False)],
)
async def test_long_prompt_is_prepared_on_a_thread(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    echo: bool,
    is_inline: bool,
) -> None:
    builder, threads = cluster.gateway.preparer._builder, []
    build = builder.build

    def recorded(*args: Any, **options: Any) -> PreparedRequest:
        threads.append(threading.current_thread())
        return build(*args, **options)

    monkeypatch.setattr(builder, "build", recorded)
    monkeypatch.setattr(preparer, "MAX_INLINE_TOKENS", 100)
    await complete(cluster, [260] * num_tokens, echo=echo)
    assert [each is threading.main_thread() for each in threads] == [is_inline]


async def test_openai_sdk(cluster: Cluster) -> None:
    async with cluster.openai as client:
        answer = await client.completions.create(
            model="tiny", prompt=["a", [5, 6]][:1], n=2, logprobs=1, echo=True
        )
    assert [choice.index for choice in answer.choices] == [0, 1]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None


# ── recovery ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_stream", [False, True])
async def test_lost_worker_does_not_change_the_response(cluster: Cluster, is_stream: bool) -> None:
    """Two prompts with two choices, echo and logprobs: worker 2 computes prompt logprobs again."""
    fields = {"prompt": ["a b", "c"], "n": 2, "echo": True, "logprobs": 1, "stop": "brown"}
    first = cluster.decodes[0]
    for decode in cluster.decodes:
        decode.answers = {1: decode.answer[:9]}
    expected = (await complete(cluster, **fields))["choices"]
    first.hold_at = 12  # choices 1 have ended
    first.loses = lambda entry: entry.first_position in (4, 5)  # until requested again
    send = events_of if is_stream else complete
    running = asyncio.create_task(send(cluster, **fields))
    while (await first.emitted.get()).first_position < 11:
        pass
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: sum(map(len, first.runs.values())) >= 4)
        await first.die()
        answer = await running
    if is_stream:
        sent_choices = [event["choices"][0] for event in answer]
        for choice in expected:
            parts = [each for each in sent_choices if each["index"] == choice["index"]]
            assert "".join(each["text"] for each in parts) == choice["text"]
            scores = [each["logprobs"] for each in parts if each["logprobs"] is not None]
            for key, values in choice["logprobs"].items():
                assert [each for part in scores for each in part[key]] == values
    else:
        assert answer["choices"] == expected
        assert answer["hearth"]["num_resubmissions"] == 2


# ── rejections ───────────────────────────────────────────────────────────────────────────────────


@in_one_test(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [400]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a"] * 9, "n": 128}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": "yes"}, "echo"),
        ({"stop": ""}, "stop"),
        ({"stream_options": {}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
async def test_bad_field(cluster: Cluster, fields: dict[str, Any], param: str) -> None:
    response = await cluster.http.post(ROUTE, json={"prompt": PROMPT, **fields})
    check_envelope(response, 400, "invalid_request", param)
    assert cluster.scheduler.submits.empty()


async def test_prompt_logprobs_too_large_for_the_bus(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(cluster.gateway._bus), "max_payload_bytes", 30_000)
    body = {"prompt": [5] * 100, "echo": True, "logprobs": 5}
    assert (await cluster.http.post(ROUTE, json=body)).status_code == 200
    response = await cluster.http.post(ROUTE, json={**body, "logprobs": 20})
    check_envelope(response, 400, "context_length_exceeded", "prompt")
