"""A worker of a picture is killed or frozen: the same answer, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.messages import Heartbeat, WorkerLoad
from tests.support.cluster.held_objects import wait_until_nothing_is_held
from tests.support.cluster.model_cluster import ModelCluster
from tests.support.cluster.vision_cluster import (
    SLOW,
    content,
    is_receiving,
    picture,
    running_model,
)

WORKERS = ("encode-1", "encode-2", "prefill-1", "prefill-2", "decode-1", "decode-2")
# Its 17 tiles take a second of CPU: several heartbeats.
STEADY = {
    **SLOW,
    "image_size": 128,
    "patch_size": 8,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
}
LONG_ANSWER = {"max_tokens": 400, "ignore_eos": True}


def text_of(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def those(newest: dict[str, Heartbeat], holds: Callable[[str, WorkerLoad], bool]) -> list[str]:
    return [n for n, each in newest.items() if each.load is not None and holds(n, each.load)]


def is_encoding_for_others(name: str, load: WorkerLoad) -> bool:
    return name.startswith("encode") and load.num_running > 0


def waits_for_vectors(name: str, load: WorkerLoad) -> bool:
    return name.startswith("prefill") and load.num_running + load.num_waiting > 0


def waits_for_kv(name: str, load: WorkerLoad) -> bool:
    return is_receiving(load)


def during_encoding(newest: dict[str, Heartbeat]) -> bool:
    return bool(those(newest, is_encoding_for_others))


MOMENTS = {"encoding": is_encoding_for_others, "vectors": waits_for_vectors, "kv": waits_for_kv}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelCluster]:
    with running_model(
        tmp_path_factory.mktemp("slow"), STEADY, scale=4, workers=WORKERS
    ) as running:
        running.client.timeout = 600.0  # of a machine that has much else to do
        yield running


@pytest.mark.long
@pytest.mark.parametrize("fault", ["kill", "freeze"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_any_worker_of_a_picture_may_be_lost(slow: ModelCluster, moment: str, fault: str) -> None:
    """Between pixels and vectors, between vectors and KV, and while decode waits."""
    question = content("What is this?", picture(1, (1000, 1000)))
    processes, is_victim = slow.processes, MOMENTS[moment]
    with ThreadPoolExecutor(1) as thread:
        salt = f"{moment} {fault}"  # so that the picture is encoded
        asked = thread.submit(slow.complete, question, cache_salt=salt, **LONG_ANSWER)
        newest = slow.wait_for_heartbeats(
            lambda newest: during_encoding(newest) and bool(those(newest, is_victim))
        )
        assert not asked.done()
        lost = those(newest, is_victim)[0]
        (processes.freeze if fault == "freeze" else processes.kill)(lost)
        answer = text_of(asked.result())
    if fault == "freeze":
        processes.thaw(lost)
    else:
        asyncio.run(processes.restart(lost))
    slow.wait_until_ready(lost)
    wait_until_nothing_is_held(processes)
    slow.wait_until_empty()
    undisturbed = slow.complete(question, cache_salt=f"{salt}, no more", **LONG_ANSWER)
    assert undisturbed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer == text_of(undisturbed)
    wait_until_nothing_is_held(processes)
