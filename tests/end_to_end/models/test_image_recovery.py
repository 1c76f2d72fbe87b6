"""A worker of a picture is killed or frozen: the same answer, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.messages import Heartbeat, WorkerLoad
from tests.end_to_end.test_chat import text_of
from tests.support.cluster.held_objects import wait_until_nothing_is_held
from tests.support.cluster.model_cluster import ModelCluster
from tests.support.cluster.vision_cluster import (
    STEADY,
    content,
    decoding,
    is_receiving,
    picture,
    running_model,
)

WORKERS = ("encode-1", "encode-2", "prefill-1", "prefill-2", "decode-1", "decode-2")
FAULTS = ("kill", "freeze")
SIZE = (1000, 1000)
ANSWER = {"max_tokens": 40, "ignore_eos": True}
LONG_ANSWER = {"max_tokens": 400, "ignore_eos": True}
LONGEST_ANSWER = {"max_tokens": 1500, "ignore_eos": True, "seed": 7}
NUM_QUEUED = 6  # pictures for two encode workers


def answered(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def those(newest: dict[str, Heartbeat], holds: Callable[[str, WorkerLoad], bool]) -> list[str]:
    return [n for n, each in newest.items() if each.load is not None and holds(n, each.load)]


def is_encoding_for_others(name: str, load: WorkerLoad) -> bool:
    return name.startswith("encode") and load.num_running > 0


def waits_for_vectors(name: str, load: WorkerLoad) -> bool:
    return name.startswith("prefill") and load.num_running + load.num_waiting > 0


def waits_for_kv(name: str, load: WorkerLoad) -> bool:
    return is_receiving(load)


def has_a_queue(name: str, load: WorkerLoad) -> bool:
    return name.startswith("encode") and load.num_running > 1


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


def lose(slow: ModelCluster, worker: str, fault: str) -> None:
    (slow.processes.freeze if fault == "freeze" else slow.processes.kill)(worker)


def bring_back(slow: ModelCluster, worker: str, fault: str) -> None:
    """Has the worker back; no process holds anything of a request then."""
    if fault == "freeze":
        slow.processes.thaw(worker)
    else:
        asyncio.run(slow.processes.restart(worker))
    slow.wait_until_ready(worker)
    wait_until_nothing_is_held(slow.processes)
    slow.wait_until_empty()


def undisturbed(slow: ModelCluster, question: list[dict], salt: str, **options: object) -> str:
    """Returns the answer to a prompt of which nothing is cached."""
    answer = slow.complete(question, cache_salt=f"{salt}, no more", **options)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    wait_until_nothing_is_held(slow.processes)
    return answered(answer)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_any_worker_of_a_picture_may_be_lost(slow: ModelCluster, moment: str, fault: str) -> None:
    """Between pixels and vectors, between vectors and KV, and while decode waits."""
    question = content("What is this?", picture(1, SIZE))
    is_victim, salt = MOMENTS[moment], f"{moment} {fault}"  # so that the picture is encoded
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(slow.complete, question, cache_salt=salt, **LONG_ANSWER)
        newest = slow.wait_for_heartbeats(
            lambda newest: during_encoding(newest) and bool(those(newest, is_victim))
        )
        assert not asked.done()
        lost = those(newest, is_victim)[0]
        lose(slow, lost, fault)
        answer = answered(asked.result())
    bring_back(slow, lost, fault)
    assert answer == undisturbed(slow, question, salt, **LONG_ANSWER)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_an_encode_worker_may_be_lost_with_pictures_in_its_queue(
    slow: ModelCluster, fault: str
) -> None:
    salt, numbers = f"queue {fault}", range(10, 10 + NUM_QUEUED)
    questions = [content("What is this?", picture(number, SIZE)) for number in numbers]
    with ThreadPoolExecutor(NUM_QUEUED) as threads:
        asked = [
            threads.submit(slow.complete, each, cache_salt=salt, **ANSWER) for each in questions
        ]
        newest = slow.wait_for_heartbeats(lambda newest: bool(those(newest, has_a_queue)))
        lost = those(newest, has_a_queue)[0]
        assert sum(each.done() for each in asked) < NUM_QUEUED - 1
        lose(slow, lost, fault)
        answers = [answered(each.result()) for each in asked]
    bring_back(slow, lost, fault)
    assert answers == [
        undisturbed(slow, each, f"{salt} {number}", **ANSWER)
        for number, each in zip(numbers, questions, strict=True)
    ]


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_decode_worker_may_be_lost_in_mid_answer(slow: ModelCluster, fault: str) -> None:
    """Its successor has neither pixels nor vectors: an encode worker has them."""
    question, salt = content("What is this?", picture(1, SIZE)), f"answer {fault}"
    stream = slow.stream(question, cache_salt=salt, **LONGEST_ANSWER)
    chunks = [next(stream) for _ in range(8)]
    lost = decoding(slow)
    lose(slow, lost, fault)
    chunks += stream
    served = chunks[-1]["hearth"]
    assert served["num_resubmissions"] >= 1 and served["decode_worker"] != lost
    bring_back(slow, lost, fault)
    assert text_of(chunks) == undisturbed(slow, question, salt, **LONGEST_ANSWER)
