"""Pinned prefixes, public prefixes and multi-turn conversations on a full cluster."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from services.cli.tenants.public_prefixes import publish_prefix, remove_prefix
from tests.support.cluster.cluster_client import ClusterClient
from tests.support.waiting import wait_until

SYSTEM = "You are a careful assistant, who answers in one short sentence. " * 12
QUESTION = "What is the KV cache?"
BLOCK_SIZE = 16


def wait_for(poll: Callable[[], dict], condition: Callable[[dict], bool]) -> dict:
    replies: list[dict] = [{}]

    def is_met() -> bool:
        replies.append(poll())
        return condition(replies[-1])

    wait_until(is_met, seen=lambda: replies[-1])
    return replies[-1]


def chat(bundled: ClusterClient, messages: list[dict], **options: object) -> dict:
    body = {"messages": messages, "temperature": 0, "max_tokens": 40}
    response = bundled.client.post("/v1/chat/completions", json=body | options)
    assert response.status_code == 200, response.text
    return response.json()


def cached_tokens(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_pinned_prefix_is_warm_before_the_first_request(bundled: ClusterClient) -> None:
    put = bundled.client.put("/v1/prefixes/careful", json={"system": SYSTEM})
    assert put.status_code == 200, put.text

    def poll() -> dict:
        return bundled.client.get("/v1/prefixes/careful").json()

    reply = wait_for(poll, lambda reply: reply["state"] == "warm")
    assert {each["worker"] for each in reply["workers"]} == {"worker-1", "worker-2"}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    dry_run = bundled.client.post(
        "/v1/prefixes/dry_run", json={"request": {"messages": messages}}
    ).json()
    assert dry_run["request"]["cached_tokens"] == reply["pinned_tokens"]
    answer = chat(bundled, messages)
    assert cached_tokens(answer) == reply["pinned_tokens"] >= 128
    counted = wait_for(poll, lambda reply: reply["hits"] >= 1)
    assert counted["saved_tokens"] == counted["hits"] * counted["pinned_tokens"]
    assert bundled.client.delete("/v1/prefixes/careful").status_code == 200


def test_public_prefix_is_warm_without_a_cache_salt(bundled: ClusterClient) -> None:
    system = f"These are the rules of the house. {SYSTEM}"
    publish_prefix(bundled.state.redis_url, "house", bundled.model, system, is_json=False)

    def poll() -> dict:
        return bundled.client.get("/v1/prefixes/house").json()

    reply = wait_for(poll, lambda reply: reply["state"] == "warm")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    answer = chat(bundled, messages)
    assert reply["is_public"]
    assert cached_tokens(answer) == reply["pinned_tokens"] >= 128
    salted = chat(bundled, messages, cache_salt="mine")
    assert cached_tokens(salted) == 0
    assert salted["choices"] == answer["choices"]
    remove_prefix(bundled.state.redis_url, "house")


def second_turn_is_cached(bundled: ClusterClient, topic: str) -> bool:
    """Whether a second turn used all blocks of the first, which its worker has computed."""
    messages = [{"role": "user", "content": f"What is {topic}? Tell me all that you know of it."}]
    first = chat(bundled, messages, ignore_eos=False)
    messages.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
    messages.append({"role": "user", "content": QUESTION})

    def second() -> dict:
        return bundled.client.post(
            "/v1/prefixes/dry_run", json={"request": {"messages": messages}}
        ).json()["request"]

    usage = first["usage"]
    num_computed = usage["prompt_tokens"] + usage["completion_tokens"]
    if first["choices"][0]["finish_reason"] == "length":
        num_computed -= 1  # the KV of the last token is not computed
    num_block_tokens = num_computed // BLOCK_SIZE * BLOCK_SIZE
    if num_block_tokens <= usage["prompt_tokens"]:
        return False  # an answer too short for a block of its own
    wait_for(second, lambda reply: reply["cached_tokens"] >= num_block_tokens)
    answer = chat(bundled, messages)
    is_cached = cached_tokens(answer) >= num_block_tokens
    assert not is_cached or answer["hearth"]["decode_worker"] == first["hearth"]["decode_worker"]
    return is_cached


def test_second_turn_reuses_the_whole_first_turn(bundled: ClusterClient) -> None:
    """Prompt and answer are cached, whichever worker computed them. A scheduler that hears nothing
    of the index within 20 ms, as on busy cores, places without it: one conversation has to hit.
    """
    topics = itertools.cycle(("decode", "prefill", "a block", "a token", "the gateway"))
    numbers = itertools.count(1)
    wait_until(lambda: second_turn_is_cached(bundled, f"{next(topics)} ({next(numbers)})"))
