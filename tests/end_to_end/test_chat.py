"""Chat and completions over HTTP on a full cluster."""

from __future__ import annotations

import concurrent.futures

import httpx
import openai
import pytest

from tests.support.cluster.hearth_up import Cluster

QUESTION = "What is the KV cache?"


@pytest.fixture(scope="module", autouse=True)
def all_blocks_are_freed(cluster: Cluster):
    yield
    cluster.wait_until_empty()


def text_of(chunks) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def test_prefill_computes_the_prompt_and_decode_answers(cluster):
    answer = cluster.complete(QUESTION)
    assert answer["hearth"]["prefill_worker"] == "prefill-1"
    assert answer["hearth"]["decode_worker"] == "decode-1"
    assert answer["hearth"]["num_pushed_tokens"] == answer["usage"]["prompt_tokens"] - 1
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "token" in answer["choices"][0]["message"]["content"]


def test_streamed_answer_equals_the_full_one(cluster):
    full = cluster.complete(QUESTION)["choices"][0]["message"]["content"]
    chunks = list(cluster.stream(QUESTION))
    assert text_of(chunks) == full
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 5


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.long), {"temperature": 1, "seed": 11}]
)
def test_concurrent_streams_equal_their_solo_runs(cluster, options):
    questions = [f"{QUESTION} Number {n}." for n in range(4)]
    solo = [text_of(cluster.stream(q, max_tokens=16, **options)) for q in questions]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = pool.map(
            lambda q: text_of(cluster.stream(q, max_tokens=16, **options)), questions
        )
        assert list(together) == solo


def test_second_request_reuses_the_shared_prefix(cluster):
    system = {"role": "system", "content": "You are a careful assistant. " * 30}
    usages = []
    for question in (QUESTION, "What is decode?"):
        body = {
            "model": cluster.model,
            "messages": [system, {"role": "user", "content": question}],
            "temperature": 0,
        }
        usages.append(cluster.client.post("/v1/chat/completions", json=body).json()["usage"])
    first, second = (usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert first == 0
    shared = second // 16 * 16
    assert second == shared > 0
    assert usages[1]["prompt_tokens"] - second < 64


@pytest.mark.parametrize(
    ("num_turns", "num_tokens"), [(80, 1500), pytest.param(400, 8000, marks=pytest.mark.long)]
)
def test_long_prompt_is_answered_with_a_sentence(cluster, num_turns, num_tokens):
    """Also one that leaves no more than the answer's room in the context."""
    history = []
    for n in range(num_turns):
        history += [
            {"role": "user", "content": f"What is decode? ({n})"},
            {"role": "assistant", "content": "Decode produces the answer one token at a time."},
        ]
    body = {"model": cluster.model, "temperature": 0, "max_tokens": 60}
    for num_messages in range(len(history), 0, -4):
        messages = [*history[:num_messages], {"role": "user", "content": QUESTION}]
        response = cluster.client.post("/v1/chat/completions", json=body | {"messages": messages})
        answer = response.json()
        if response.status_code == 200 and not answer["hearth"].get("warnings"):
            break  # a warning says that the answer has less than 60 tokens of room
        assert response.status_code in (200, 400)
    assert answer["usage"]["prompt_tokens"] > num_tokens
    assert answer["choices"][0]["message"]["content"].rstrip().endswith((".", "!", "?"))


def test_openai_sdk_works_as_a_client(cluster):
    client = cluster.sdk
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": QUESTION}]
    full = client.chat.completions.create(model=model, messages=messages, temperature=0)
    assert full.choices[0].finish_reason == "stop"
    deltas = client.chat.completions.create(
        model=model, messages=messages, temperature=0, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in deltas)
    assert streamed == full.choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=messages)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_client_disconnect_frees_blocks_on_both_workers(cluster):
    for _ in range(3):
        stream = cluster.stream(QUESTION, max_tokens=4000, ignore_eos=True)
        next(stream)
        stream.close()
    cluster.wait_until_empty()


def test_health_ready_metrics_and_openapi(cluster):
    assert cluster.client.get("/health").status_code == 200
    assert cluster.client.get("/ready").json()["ready"] is True
    assert "hearth" in cluster.client.get("/metrics").text
    paths = cluster.client.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/prefixes/{name}"} <= set(paths)


def test_chat_works_without_kv_index_and_redis(cluster):
    before = cluster.complete(QUESTION)["choices"][0]["message"]["content"]
    with cluster.frozen(cluster.pid_of("kv_index-1"), cluster.pid_of_server("redis-server")):
        for _ in range(3):
            assert cluster.complete(QUESTION)["choices"][0]["message"]["content"] == before
        unknown = {"Authorization": "Bearer nobody-has-seen-this"}
        response = cluster.client.get("/v1/models", headers=unknown)
        assert response.status_code == 503 and "Retry-After" in response.headers
    assert cluster.complete(QUESTION)["choices"][0]["message"]["content"] == before


def test_stop_string_ends_answer_with_usage(cluster):
    full = cluster.complete(QUESTION)["choices"][0]["message"]["content"]
    stop = full.split()[3]
    answer = cluster.complete(QUESTION, stop=[stop])
    assert answer["choices"][0]["message"]["content"] == full[: full.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert answer["hearth"]["decode_worker"] == "decode-1"


def test_invalid_api_key_is_401(cluster):
    response = httpx.get(f"{cluster.url}/v1/models", headers={"Authorization": "Bearer nope"})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_choices_differ_and_first_equals_single_choice(cluster):
    body = {
        "model": cluster.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 2,  # the demo model's distributions are sharp
        "seed": 11,
        "max_tokens": 24,
        "frequency_penalty": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    alone = cluster.client.post("/v1/chat/completions", json=body).json()
    three = cluster.client.post("/v1/chat/completions", json=body | {"n": 3}).json()
    assert three["choices"][0] == alone["choices"][0]
    assert len({choice["message"]["content"] for choice in three["choices"]}) == 3
    assert three["hearth"]["prefill_worker"] == "prefill-1"


def test_choices_have_equal_echoed_prompt_logprobs(cluster):
    body = {
        "model": cluster.model,
        "prompt": QUESTION,
        "temperature": 1,
        "seed": 11,
        "max_tokens": 8,
        "echo": True,
        "logprobs": 1,
    }
    alone = cluster.client.post("/v1/completions", json=body).json()
    two = cluster.client.post("/v1/completions", json=body | {"n": 2}).json()
    first, second = two["choices"]
    assert first == alone["choices"][0]
    num_prompt_tokens = alone["usage"]["prompt_tokens"]
    assert first["logprobs"]["token_logprobs"][0] is None
    assert None not in first["logprobs"]["token_logprobs"][1:]
    prompts = [each["logprobs"]["token_logprobs"][:num_prompt_tokens] for each in (first, second)]
    assert prompts[0] == prompts[1]
