"""Pictures through encode workers of their own: encoded once, wherever the prompt is computed, and
the same answer without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from tests.end_to_end.models.test_images import ANSWER
from tests.support.cluster.model_cluster import ModelCluster
from tests.support.cluster.vision_cluster import (
    content,
    picture,
    running_model,
)
from tests.support.services.vision_dir import PATCH, TILE
from tests.support.waiting import wait_until

ENCODERS = ("encode-1", "encode-2")
WORKERS = (*ENCODERS, "prefill-1", "prefill-2", "decode-1")
SHORT = {"max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelCluster]:
    folder = tmp_path_factory.mktemp("encode")
    vision = {"image_size": TILE, "patch_size": PATCH}
    with running_model(folder, vision, workers=WORKERS) as running:
        yield running


def counts(cluster: ModelCluster, field: str) -> Counter[str]:
    """Returns a counter of the loads by role, once all workers are idle."""
    cluster.wait_until_empty()
    newest = cluster.wait_for_heartbeats(lambda newest: set(WORKERS) <= set(newest))
    found = Counter[str]()
    for name, each in newest.items():
        if each.load is not None:
            found[name.partition("-")[0]] += getattr(each.load, field)
    return found


def text_of(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def ask_patiently(cluster: ModelCluster, question: list[dict]) -> None:
    """A tenant's requests at once are limited: those above it are asked again."""
    body = {
        "model": cluster.model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        **SHORT,
    }

    def is_answered() -> bool:
        response = cluster.client.post("/v1/chat/completions", json=body)
        assert response.status_code in (200, 429, 503), response.text
        return response.status_code == 200

    wait_until(is_answered, timeout_s=240)


def thumbnail(seed: int) -> dict:
    """Returns a picture of one tile."""
    part = picture(seed)
    return {**part, "image_url": {**part["image_url"], "detail": "low"}}


QUESTIONS = count()


def ask_all(cluster: ModelCluster, numbers: Iterable[int], frozen: str = "") -> Counter[str]:
    """Asks about one thumbnail for each number, always with another question, while a worker is
    frozen. Returns the images that each role has encoded.
    """
    before = counts(cluster, "num_encoded_images")
    asked = [content(f"{next(QUESTIONS)} is it?", thumbnail(n)) for n in numbers]
    if frozen:
        cluster.processes.freeze(frozen)
    with ThreadPoolExecutor(8) as threads:
        for each in [threads.submit(ask_patiently, cluster, each) for each in asked]:
            each.result()
    if frozen:
        cluster.processes.thaw(frozen)
    return counts(cluster, "num_encoded_images") - before


def test_a_shared_picture_is_encoded_once(cluster: ModelCluster) -> None:
    """All workers choose the same encode worker for a picture, also the prefill worker that needs
    it when the first one is gone: by chance it would choose the other one for half of them.
    """
    assert ask_all(cluster, [7] * 24) == {"encode": 1}
    pictures = range(100, 106)
    assert ask_all(cluster, pictures) == {"encode": len(pictures)}
    assert ask_all(cluster, pictures, frozen="prefill-1") == {}
    assert ask_all(cluster, pictures, frozen="prefill-2") == {}


@pytest.mark.long
def test_different_pictures_are_encoded_once_each_by_both(cluster: ModelCluster) -> None:
    assert ask_all(cluster, range(200, 264)) == {"encode": 64}
    newest = cluster.wait_for_heartbeats(lambda newest: set(ENCODERS) <= set(newest))
    each = [newest[name].load.num_encoded_images for name in ENCODERS]  # type: ignore[union-attr]
    assert min(each) >= 10, each  # 64 by hash
    fetched = counts(cluster, "num_fetched_images")
    assert fetched["prefill"] + fetched["decode"] >= 64


@pytest.mark.long
def test_answers_are_those_of_workers_that_encode_themselves(cluster: ModelCluster) -> None:
    question = content("What is this?", picture(1), "And this?", picture(2, (40, 200)))
    apart = text_of(cluster.complete(question, **ANSWER))
    again = text_of(cluster.complete(question, **ANSWER, cache_salt="again"))
    before = counts(cluster, "num_encoded_images")
    for name in ENCODERS:
        cluster.kill(name)
    alone = text_of(cluster.complete(question, **ANSWER, cache_salt="alone"))
    assert apart == again == alone
    found = cluster.wait_for_heartbeats(lambda newest: {"prefill-1", "prefill-2"} <= set(newest))
    own = [each.load.num_encoded_images for each in found.values() if each.load is not None]
    assert sum(own) - before["prefill"] - before["decode"] == 2


@pytest.mark.long
def test_prefill_may_encode_for_others_and_ranks_may_not_have_to(tmp_path: Path) -> None:
    """One worker encodes beside prefill; the other prefill worker is of two ranks."""
    workers = ("prefill-1", "prefill-2", "decode-1")
    options = {"prefill-1": {"role": "encode"}, "prefill-2": {"tp": "2"}}
    vision = {"image_size": TILE, "patch_size": PATCH}
    question = content("What is this?", picture(1))
    with running_model(tmp_path, vision, workers=workers, options_of=options) as running:
        answers = [
            text_of(running.complete(question, **SHORT, cache_salt=f"{number}"))
            for number in range(12)
        ]
        running.wait_until_empty()
        newest = running.wait_for_heartbeats(lambda newest: set(workers) <= set(newest))
    assert len(set(answers)) == 1
    loads = {name: newest[name].load for name in workers}
    assert sum(each.num_encoded_images for each in loads.values()) == 12, loads  # salts: roots
    assert loads["prefill-1"].num_encoded_images + loads["decode-1"].num_encoded_images == 12
    assert loads["prefill-2"].num_fetched_images + loads["decode-1"].num_fetched_images > 0
