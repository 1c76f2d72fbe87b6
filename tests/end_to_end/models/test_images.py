"""Chats about pictures through split workers: the same answer, whoever encodes the picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.messages import Heartbeat, WorkerLoad
from tests.end_to_end.test_chat import text_of
from tests.support.cluster.model_cluster import ModelCluster
from tests.support.cluster.vision_cluster import (
    SLOW,
    WORKERS,
    content,
    decoding,
    is_encoding,
    is_receiving,
    picture,
    running_model,
    workers_of,
)
from tests.support.services.vision_dir import PATCH, TILE
from tests.support.waiting import wait_until

ANSWER = {"max_tokens": 24, "ignore_eos": True}
LONG_ANSWER = {"max_tokens": 250, "ignore_eos": True, "seed": 7}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelCluster]:
    folder = tmp_path_factory.mktemp("images")
    with running_model(folder, {"image_size": TILE, "patch_size": PATCH}) as running:
        yield running


def encoded(cluster: ModelCluster) -> dict[str, int]:
    """Returns the images that each worker has encoded, once all workers are idle again."""
    cluster.wait_until_empty()
    newest = cluster.wait_for_heartbeats(lambda newest: set(WORKERS) <= set(newest))
    return {name: each.load.num_encoded_images for name, each in workers_of(newest).items()}


def test_a_prefix_with_a_picture_is_encoded_before_its_requests(cluster: ModelCluster) -> None:
    def of(role: str, *parts: dict | str) -> dict:
        return {"role": role, "content": content(*parts)}

    shown = [of("user", "Look at this.", picture(11)), of("assistant", "A picture.")]
    asked = {"messages": [*shown, of("user", "What is in it?")], **ANSWER}
    without = cluster.complete("", **asked, cache_salt="other")
    before = encoded(cluster)
    path, body = "/v1/prefixes/shown", {"model": cluster.model, "messages": shown}
    pinned = cluster.client.put(path, json=body).json()

    def is_warm() -> bool:
        return cluster.client.get(path).json()["state"] == "warm"

    wait_until(is_warm, seen=lambda: cluster.client.get(path).json())
    pinned = cluster.client.get(path).json()
    assert {each["worker"] for each in pinned["workers"]} == {*WORKERS}
    after = encoded(cluster)
    assert all(after[name] == before[name] + 1 for name in WORKERS)
    answer = cluster.complete("", **asked)
    assert answer["choices"][0]["message"] == without["choices"][0]["message"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == pinned["pinned_tokens"] > 4
    assert encoded(cluster) == after
    assert cluster.client.delete(path).status_code == 200
    assert cluster.client.get(path).status_code == 404


def test_pictures_are_encoded_at_prefill_and_survive_their_workers(cluster: ModelCluster) -> None:
    question = content("What is this?", picture(1), "And this?", picture(2, (40, 200)))
    first = cluster.complete(question, **ANSWER)
    answer = first["choices"][0]["message"]["content"]
    assert sum(encoded(cluster).values()) >= 2  # more where a busy worker left it to another
    assert first["usage"]["prompt_tokens"] > 2 * 4

    def is_cached() -> bool:
        again = cluster.complete(question, **ANSWER)
        assert again["choices"][0]["message"]["content"] == answer
        return again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    wait_until(is_cached)
    other = cluster.complete(content("What is this?", picture(3), "And this?", picture(4)))
    assert other["choices"][0]["message"]["content"] != answer

    new = content("Once more.", picture(1), picture(5), picture(6))
    stream = cluster.stream(new, **LONG_ANSWER)
    text = "".join(text_of(iter([next(stream)])) for _ in range(8))
    lost = decoding(cluster)
    for name in ("prefill-1", "prefill-2", lost):  # the other one has neither pixels nor KV
        cluster.kill(name)
    text += text_of(stream)
    assert cluster.complete(new, **LONG_ANSWER)["choices"][0]["message"]["content"] == text
    (left,) = {"decode-1", "decode-2"} - {lost}
    load = cluster.wait_for_heartbeats(lambda newest: left in newest)[left].load
    assert load is not None
    assert load.num_encoded_images >= 3


@pytest.mark.long
@pytest.mark.parametrize("is_victim", [is_encoding, is_receiving])
def test_a_worker_may_die_while_a_picture_is_encoded(
    tmp_path: Path, is_victim: Callable[[WorkerLoad], bool]
) -> None:
    """The prefill worker between pixels and KV, and the decode worker that waits for the KV."""
    question = content("What is this?", picture(1, (1000, 1000)))

    def those(newest: dict[str, Heartbeat], holds: Callable[[WorkerLoad], bool]) -> list[str]:
        return [name for name, each in workers_of(newest).items() if holds(each.load)]

    with running_model(tmp_path, SLOW, scale=4) as slow, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(slow.complete, question, **ANSWER)
        slow.wait_for_heartbeats(lambda newest: bool(those(newest, is_encoding)))
        newest = slow.wait_for_heartbeats(lambda newest: bool(those(newest, is_victim)))
        slow.kill(those(newest, is_victim)[0])
        answer = asked.result()
        alone = slow.complete(question, **ANSWER, cache_salt="other")
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["choices"][0]["message"] == alone["choices"][0]["message"]
