"""Constraints that are made to hurt are answered, and nothing else notices them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.cluster.hearth_up import Cluster
from tests.support.corpora.hostile_grammars import Hostile, hostile_grammars

QUESTION = "What is the KV cache?"
ANSWER_TIMEOUT_S = 30.0  # of a loaded machine; scripts measure the 1.5 s
NUM_CLIENTS = 4
FREE = {"max_tokens": 100, "ignore_eos": True}
PROCESSES = ("gateway-1", "prefill-1", "decode-1", "scheduler-1")


@pytest.mark.parametrize(
    "stride",
    [pytest.param(1, marks=pytest.mark.long, id="all"), pytest.param(18, id="every 18th")],
)
def test_hostile_constraints_are_answered_beside_a_free_stream(
    cluster: Cluster, stride: int
) -> None:
    expected = _text(cluster)
    pids = {name: cluster.pid_of(name) for name in PROCESSES}
    with (
        httpx.Client(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client,
        ThreadPoolExecutor(NUM_CLIENTS + 1) as threads,
    ):
        free = threads.submit(_text, cluster)
        cases = hostile_grammars()[::stride]
        answers = [*threads.map(lambda case: _answer(cluster, client, case), cases)]
        assert free.result() == expected
    unexpected = [
        (case.name, response.status_code, response.text[:300])
        for case, response in zip(cases, answers, strict=True)
        if not _is_expected(case, response)
    ]
    assert not unexpected
    assert {name: cluster.pid_of(name) for name in PROCESSES} == pids
    cluster.wait_until_empty()


def _text(cluster: Cluster) -> str:
    chunks = cluster.stream(QUESTION, **FREE)
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


def _answer(cluster: Cluster, client: httpx.Client, case: Hostile) -> httpx.Response:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": cluster.model, "messages": messages, "temperature": 0, "max_tokens": 8}
    return client.post(
        f"{cluster.url}/v1/chat/completions",
        content=json.dumps(body).encode()[:-1] + b"," + case.members + b"}",
        headers={
            "authorization": f"Bearer {cluster.state.api_key}",
            "content-type": "application/json",
        },
    )


def _is_expected(case: Hostile, response: httpx.Response) -> bool:
    """A refusal says why, in the API's form; a client with many may also be told to wait."""
    if response.status_code == 200:
        return not case.is_refused
    return response.status_code in (400, 413, 429) and bool(response.json()["error"]["message"])
