"""Workers that run prefill and decode handlers over one engine, without any other worker."""

from __future__ import annotations

import pytest

from tests.end_to_end.cluster import run_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    options = ("--prefill", "0", "--decode", "0", "--both", "2")
    with run_cluster(tmp_path_factory.mktemp("cluster"), *options) as running:
        yield running


def test_worker_with_both_roles_answers(cluster):
    answer = cluster.complete("What is the KV cache?")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "token" in answer["choices"][0]["message"]["content"]
    hearth = answer["hearth"]
    assert hearth["decode_worker"].startswith("worker-")
    assert hearth["prefill_worker"] is None or hearth["prefill_worker"].startswith("worker-")
