"""Workers of several ranks: those of prefill push to those of decode."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.worker.worker import DEVICE_LOST_STATUS
from shared.lifecycle.worker_roles import BOTH
from shared.messages import ChangeRoles, Done, WorkerRole
from shared.subjects import lifecycle
from shared.transport.bus import NatsBus
from tests.end_to_end.test_chat import text_of
from tests.shared.engine.parallel.processes.test_group import ends_within
from tests.support.cluster.chaos_cluster import MONITOR
from tests.support.cluster.cluster_client import ClusterClient
from tests.support.cluster.hearth_up import run_cluster
from tests.support.cluster.model_cluster import ModelCluster, RenewedCluster, run_model
from tests.support.waiting import LIMIT_S, wait_until

TIMEOUT_S = LIMIT_S
# What a resumed answer must replay besides its text: sampling, and its place in a grammar. Every
# line is one of few, so a lost place would show.
LINES = r"([0-9]{3}: [a-f]{4,12}, (yes|no)\n){8}"
SAMPLED = {
    "max_tokens": 250,
    "temperature": 1,
    "seed": 7,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.05,
    "logit_bias": {"40": -3},
    "bad_words": ["bad"],
    "regex": LINES,
}
RANKS, SINGLE = "worker-1", "worker-2"
QUESTION = "What is the KV cache?"
ANSWER = (
    "The KV cache stores the keys and values of every token read so far, so that each new token "
    "attends to them without computing them again."
)


@pytest.fixture(scope="module")
def renewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RenewedCluster]:
    options_of = {RANKS: {"tp": "2", "announce": "prefill"}, SINGLE: {"announce": "decode"}}

    def start() -> AbstractContextManager[ModelCluster]:
        folder = tmp_path_factory.mktemp("ranks")
        return run_model(folder, DEMO_MODEL_DIR, options_of, options_of=options_of)

    with RenewedCluster(start) as found:
        yield found


@pytest.fixture
def cluster(renewed: RenewedCluster) -> ModelCluster:
    """A worker of two ranks, and one of a single process."""
    return renewed.cluster()


def change(cluster: ModelCluster, worker_id: str, *roles: WorkerRole) -> None:
    async def send() -> None:
        bus = await NatsBus.connect(cluster.processes.nats_url, process_id=MONITOR)
        command = ChangeRoles(roles=roles)
        await bus.request(lifecycle("decode", worker_id), command, Done, timeout_s=TIMEOUT_S)
        await bus.close()

    asyncio.run(send())


def is_handed_off(cluster: ClusterClient, source: str, target: str, salt: str) -> bool:
    """Whether `source` computed the prompt, no token of it twice, and `target` the answer, which is
    that of workers of one process.
    """
    answer = cluster.complete(QUESTION, max_tokens=60, cache_salt=salt)
    assert answer["choices"][0]["message"]["content"] == ANSWER
    served = answer["hearth"]
    if (served["prefill_worker"], served["decode_worker"]) != (source, target):
        return False
    return served["num_pushed_tokens"] == answer["usage"]["prompt_tokens"] - 1


def until_handed_off(cluster: ClusterClient, source: str, target: str) -> None:
    """On busy cores a handoff may time out: one has to succeed."""
    numbers = itertools.count()
    wait_until(lambda: is_handed_off(cluster, source, target, f"{source} {next(numbers)}"))


def test_ranks_push_to_one_process_and_receive_from_one(cluster: ModelCluster) -> None:
    assert len(ranks_of(cluster)) == 2
    until_handed_off(cluster, RANKS, SINGLE)
    change(cluster, SINGLE, *BOTH)  # so that there is always one that decodes
    change(cluster, RANKS, "decode")
    change(cluster, SINGLE, "prefill")
    until_handed_off(cluster, SINGLE, RANKS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "pp"), [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2)]
)
def test_workers_of_unlike_shapes_hand_off(
    tmp_path: Path, prefill_tp: int, decode_tp: int, pp: int
) -> None:
    sizes = {"--prefill-tp": prefill_tp, "--decode-tp": decode_tp, "--pp": pp}
    options = [str(part) for option in sizes.items() for part in option]
    with run_cluster(tmp_path, *options) as cluster:
        until_handed_off(cluster, "prefill-1", "decode-1")


@pytest.mark.long  # short: a killed rank ends its group, and a lost device ends its worker
def test_lost_rank_is_one_lost_worker(cluster: ModelCluster) -> None:
    """All its ranks end, and its stream goes on elsewhere, where prompts are computed from then on:
    there is no successor.
    """
    change(cluster, SINGLE, *BOTH)
    change(cluster, RANKS, "decode")
    change(cluster, SINGLE, "prefill")
    victims = ranks_of(cluster)
    check_stream_moves(cluster, victims[1], signal.SIGKILL)
    answer = cluster.complete(QUESTION, max_tokens=60, cache_salt="alone")
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["hearth"]["prefill_worker"] is None
    assert ends_within(victims, TIMEOUT_S)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_process_of_a_device_is_a_lost_worker(tmp_path: Path, number: int) -> None:
    options_of = {RANKS: {"device-process": ""}, SINGLE: {}}
    with run_model(tmp_path, DEMO_MODEL_DIR, options_of, options_of=options_of) as cluster:
        change(cluster, RANKS, "decode")
        change(cluster, SINGLE, "prefill")
        check_stream_moves(cluster, cluster.processes.rank_pid(RANKS, 0), number)


def check_stream_moves(cluster: ModelCluster, victim: int, number: int) -> None:
    """A stream goes on elsewhere with the same text, and the worker ends."""
    expected = text_of(cluster.stream(QUESTION, **SAMPLED))
    assert re.fullmatch(LINES, expected)
    stream = cluster.stream(QUESTION, **SAMPLED)
    chunks = [next(stream) for _ in range(3)]
    change(cluster, SINGLE, *BOTH)
    os.kill(victim, number)
    chunks += list(stream)
    assert text_of(chunks) == expected
    assert chunks[-1]["hearth"]["decode_worker"] == SINGLE
    assert chunks[-1]["hearth"]["num_resubmissions"] >= 1
    ended = cluster.processes.ended(RANKS, TIMEOUT_S)
    assert asyncio.run(ended) == DEVICE_LOST_STATUS


def ranks_of(cluster: ModelCluster) -> list[int]:
    return [cluster.processes.rank_pid(RANKS, rank) for rank in range(2)]
