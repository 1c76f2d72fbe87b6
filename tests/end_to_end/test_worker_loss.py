"""Worker deaths during a request: the client sees no error, only a pause."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.end_to_end.test_chat import text_of
from tests.support.cluster.hearth_up import Cluster

QUESTION = "What is the KV cache?"
SPARE = "decode-2"
LINES = r"([0-9]{3}: [a-f]{4,12}, (yes|no)\n){30}"
# What a resumed answer must replay besides its text: sampling, and its place in a grammar. Every
# line is one of few, so a lost place would show.
OPTIONS = {
    "max_tokens": 600,
    "temperature": 1,
    "seed": 7,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.05,
    "logit_bias": {"40": -3},
    "bad_words": ["bad"],
    "regex": LINES,
}


@pytest.fixture(scope="module")
def spare(cluster: Cluster) -> Iterator[subprocess.Popen[bytes]]:
    """A second decode worker."""
    with cluster.joined("decode", SPARE) as worker:
        cluster.wait_until_ready(SPARE)
        yield worker
    cluster.wait_until_ready("prefill-1", "decode-1")


def test_stream_survives_its_decode_workers_death(
    cluster: Cluster, spare: subprocess.Popen[bytes]
) -> None:
    expected = list(cluster.stream(QUESTION, **OPTIONS))
    assert re.fullmatch(LINES, text_of(expected))
    stream = cluster.stream(QUESTION, **OPTIONS)
    chunks = [next(stream) for _ in range(20)]
    # one worker computes all tokens of a request: the one with a running request
    newest = cluster.wait_for_heartbeats(
        lambda h: any(each.load and each.load.num_running for each in h.values())
    )
    victim = next(p for p, each in newest.items() if each.load and each.load.num_running)
    if victim == SPARE:
        spare.kill()
    else:
        cluster.kill(victim)
    chunks += list(stream)
    assert text_of(chunks) == text_of(expected)
    assert chunks[-1]["hearth"]["decode_worker"] != victim
    assert chunks[-1]["hearth"]["num_resubmissions"] >= 1


def test_decode_computes_the_prompt_if_all_prefills_died(cluster: Cluster) -> None:
    expected = cluster.complete(QUESTION)
    cluster.kill("prefill-1")
    answer = cluster.complete(QUESTION, cache_salt="no prefill")
    assert answer["hearth"]["prefill_worker"] is None
    assert answer["choices"][0]["message"] == expected["choices"][0]["message"]
    cluster.wait_until_ready("prefill-1")
    assert cluster.complete(QUESTION)["choices"][0]["message"] == expected["choices"][0]["message"]
