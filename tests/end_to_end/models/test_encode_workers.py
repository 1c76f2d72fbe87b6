"""Pictures through encode workers of their own: encoded once, wherever the prompt is computed, and
the same answer without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.messages import Heartbeat
from tests.end_to_end.models.test_images import (
    ANSWER,
    SLOW,
    content,
    is_encoding,
    picture,
    running_model,
)
from tests.support.cluster.model_cluster import ModelCluster
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


def test_a_shared_picture_is_encoded_once_and_others_once_each(cluster: ModelCluster) -> None:
    def ask_all(numbers: list[int]) -> Counter[str]:
        before = counts(cluster, "num_encoded_images")
        asked = [content(f"{place} is it?", picture(n)) for place, n in enumerate(numbers)]
        with ThreadPoolExecutor(16) as threads:
            for each in [threads.submit(cluster.complete, each, **SHORT) for each in asked]:
                each.result()
        return counts(cluster, "num_encoded_images") - before

    assert ask_all([7] * 64) == {"encode": 1}
    assert ask_all([*range(100, 164)]) == {"encode": 64}
    newest = cluster.wait_for_heartbeats(lambda newest: set(ENCODERS) <= set(newest))
    each = [newest[name].load.num_encoded_images for name in ENCODERS]  # type: ignore[union-attr]
    assert min(each) >= 10, each  # 65 by hash
    assert counts(cluster, "num_fetched_images")["prefill"] >= 65


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
