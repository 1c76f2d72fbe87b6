"""Worker deaths during a request: the client sees no error, only a pause."""

from __future__ import annotations

import pytest

from tests.end_to_end.test_chat import text_of
from tests.support.cluster.hearth_up import run_cluster

QUESTION = "What is the KV cache?"
# sampling options that a resumed answer must replay besides its text
OPTIONS = {
    "max_tokens": 500,
    "ignore_eos": True,
    "temperature": 1,
    "seed": 7,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.05,
    "logit_bias": {"40": -3},
    "bad_words": ["cache"],
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    options = ("--prefill", "2", "--decode", "2")
    with run_cluster(tmp_path_factory.mktemp("cluster"), *options) as running:
        yield running


# an answer under a grammar: every line is one of few, so a lost place would show
CONSTRAINED = {
    "max_tokens": 500,
    "temperature": 1,
    "seed": 7,
    "regex": "([0-9]{3}: [a-f]{4,12}, (yes|no)\\n){40}",
}


@pytest.mark.parametrize("options", [OPTIONS, CONSTRAINED])
def test_stream_survives_its_decode_workers_death(cluster, options):
    expected = list(cluster.stream(QUESTION, **options))
    stream = cluster.stream(QUESTION, **options)
    chunks = [next(stream) for _ in range(20)]
    # one worker computes all tokens of a request: the one with a running request
    newest = cluster.wait_for_heartbeats(
        lambda h: any(each.load and each.load.num_running for each in h.values())
    )
    victim = next(p for p, each in newest.items() if each.load and each.load.num_running)
    cluster.kill(victim)
    chunks += list(stream)
    assert text_of(chunks) == text_of(expected)
    assert chunks[-1]["hearth"]["decode_worker"] != victim
    assert chunks[-1]["hearth"]["num_resubmissions"] >= 1
    cluster.wait_until_ready("decode-1", "decode-2")


def test_decode_computes_the_prompt_if_all_prefills_died(cluster):
    expected = cluster.complete(QUESTION)
    for process_id in ("prefill-1", "prefill-2"):
        cluster.kill(process_id)
    answer = cluster.complete(QUESTION + " ")
    assert answer["hearth"]["prefill_worker"] is None
    assert answer["choices"][0]["message"]["content"]
    cluster.wait_until_ready("prefill-1", "prefill-2")
    assert cluster.complete(QUESTION)["choices"][0]["message"] == expected["choices"][0]["message"]
