"""Pictures at TP 2: the bits of one process, whoever encodes them and wherever chunks end; and a
rank may be lost in mid-answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from services.worker.worker import DEVICE_LOST_STATUS
from tests.end_to_end.test_chat import text_of
from tests.support.cluster.model_cluster import ModelCluster
from tests.support.cluster.vision_cluster import content, decoding, picture, running_model
from tests.support.services.vision_dir import PATCH, TILE
from tests.support.waiting import LIMIT_S, wait_until

WORKERS = ("encode-1", "prefill-1", "decode-1")
QUESTION = content("What is this?", picture(1), "And this?", picture(2, (40, 200)), "Say it.")
ANSWER = {"max_tokens": 24, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}
SHORT_CHUNKS = {"max-batch-tokens": "24"}  # they end within tiles


LONG_ANSWER = {"max_tokens": 800, "ignore_eos": True, "seed": 7, "temperature": 1}


class Expected(NamedTuple):
    """Of workers of one process: `choice` has its logprobs."""

    choice: dict
    text: str  # of LONG_ANSWER


@contextmanager
def running(
    folder: Path,
    options_of: Mapping[str, Mapping[str, str]],
    workers: tuple[str, ...] = WORKERS,
) -> Iterator[ModelCluster]:
    vision = {"image_size": TILE, "patch_size": PATCH}
    with running_model(folder, vision, workers=workers, options_of=options_of) as cluster:
        yield cluster


def ask(cluster: ModelCluster, **options: Any) -> tuple[dict, int]:
    """Returns the first choice with its logprobs, and the cached tokens of the prompt."""
    found = cluster.complete(QUESTION, **ANSWER, **options)
    return found["choices"][0], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def num_encoded(cluster: ModelCluster, name: str) -> int:
    newest = cluster.wait_for_heartbeats(lambda newest: name in newest)
    assert newest[name].load is not None
    return newest[name].load.num_encoded_images


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    with running(tmp_path_factory.mktemp("one"), {}) as cluster:
        choice, cached = ask(cluster)
        text = text_of(cluster.stream(QUESTION, **LONG_ANSWER))
    assert cached == 0 and len(choice["logprobs"]["content"]) == ANSWER["max_tokens"]
    return Expected(choice, text)


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks",
    [{"prefill-1": "2", "decode-1": "2"}, {"prefill-1": "2"}, {"decode-1": "2"}],
    ids=["both", "prefill", "decode"],
)
def test_bits_of_pictures_at_two_ranks(
    tmp_path: Path, expected: Expected, ranks: dict[str, str]
) -> None:
    options_of = {name: {"tp": tp, **SHORT_CHUNKS} for name, tp in ranks.items()}
    with running(tmp_path, options_of) as cluster:
        assert ask(cluster) == (expected.choice, 0)
        cluster.wait_until_empty()
        assert num_encoded(cluster, "encode-1") == 2

        def is_cached() -> bool:
            again, cached = ask(cluster)
            assert again == expected.choice
            return cached > 0

        wait_until(is_cached)
        cluster.kill("encode-1")
        assert ask(cluster, cache_salt="encoded by whoever needs it") == (expected.choice, 0)
        cluster.wait_until_empty()
        assert num_encoded(cluster, "prefill-1") + num_encoded(cluster, "decode-1") == 2
        cluster.kill("prefill-1")
        assert ask(cluster, cache_salt="computed at decode") == (expected.choice, 0)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_about_pictures_survives_a_rank(
    tmp_path: Path, expected: Expected, number: signal.Signals
) -> None:
    """The other worker, of two ranks, too, has neither pixels nor KV of them."""
    decode = ("decode-1", "decode-2")
    options_of = {name: {"tp": "2", **SHORT_CHUNKS} for name in decode}
    with running(tmp_path, options_of, ("encode-1", "prefill-1", *decode)) as cluster:
        stream = cluster.stream(QUESTION, **LONG_ANSWER)
        chunks = [next(stream) for _ in range(8)]
        lost = decoding(cluster)
        os.kill(cluster.processes.rank_pid(lost, 1), number)
        chunks += stream
        assert text_of(chunks) == expected.text
        served = chunks[-1]["hearth"]
        assert served["num_resubmissions"] >= 1 and served["decode_worker"] != lost
        ended = cluster.processes.ended(lost, LIMIT_S)
        assert asyncio.run(ended) == DEVICE_LOST_STATUS
