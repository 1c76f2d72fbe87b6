"""`hearth profile` on a cluster that serves: the trace arrives, and holds nothing of a request."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.services.cli.in_process import call_hearth
from tests.support.cluster.hearth_up import Cluster

SECRET = "heliotrope"


def profile(cluster: Cluster, *arguments: str) -> CompletedProcess[str]:
    url = cluster.state.nats_url_of("operator")
    assert url is not None
    return call_hearth(("profile", *arguments), {"HEARTH_NATS_URL": url})


@pytest.fixture
def serving(cluster: Cluster) -> Iterator[list[str]]:
    """Answers go on; yields their texts."""
    texts: list[str] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            body = {
                "model": cluster.model,
                "messages": [{"role": "user", "content": f"What is {SECRET}?"}],
                "temperature": 0,
                "max_tokens": 24,
            }
            response = cluster.client.post("/v1/chat/completions", json=body)
            texts.append(response.raise_for_status().json()["choices"][0]["message"]["content"])

    asking = threading.Thread(target=ask)
    asking.start()
    yield texts
    is_over.set()
    asking.join()


def test_steps_of_a_serving_worker(cluster: Cluster, serving: list[str], tmp_path: Path) -> None:
    out = tmp_path / "trace.json.gz"
    result = profile(cluster, "decode-1", "--steps", "5", "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("decode-1: 5 steps; ")
    text = gzip.decompress(out.read_bytes()).decode()
    names = [each["name"] for each in json.loads(text)["traceEvents"]]
    assert sum(name.startswith("step: ") for name in names) == 5
    assert SECRET not in text and "Concrete Inputs" not in text
    assert len(set(serving)) <= 1  # recorded or not, the tokens are the same


def test_bad_input_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    for arguments, error in (
        (("decode-9",), "no worker 'decode-9'; the workers are: decode-1, prefill-1"),
        (("gateway-1",), "no worker 'gateway-1'; the workers are: decode-1, prefill-1"),
        (("decode-1", "--steps", "0"), "--steps 0: it must be 1 to 200"),
        (("decode-1", "--steps", "201"), "--steps 201: it must be 1 to 200"),
        (
            ("decode-1", "--timeout-s", "301"),
            "--timeout-s 301: it must be more than 0, at most 300",
        ),
        (("decode-1", "--out", str(tmp_path)), f"--out {tmp_path}: not a file that can be written"),
        (("decode-1", "--timeout-s", "0.1"), "decode-1 computed no step within 0.1 s"),
    ):
        result = profile(cluster, *arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.splitlines()[-1].endswith(error), result.stderr
