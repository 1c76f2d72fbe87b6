"""Workers that multiply with AVX-512 beside a decode worker that does not.

All are real processes on one host: the compiler and the library of one are limited to fewer
instructions, so it computes other bits. FP32, as torch refuses BF16 under this limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kernels.ops import cpu_host
from services.cli.cluster.service_options import DEMO_MODEL_NAME
from shared.messages import Heartbeat
from shared.numerics import Mode
from tests.support.cluster.chaos_cluster import MONITOR, ChaosCluster
from tests.support.cluster.cluster_client import receive_heartbeats
from tests.support.services.running import WAIT_S, eventually, start_hearth

pytestmark = pytest.mark.long

WITHOUT_AVX512 = {"NUMBA_CPU_NAME": "generic", "ONEDNN_MAX_CPU_ISA": "AVX2"}
TEXT = "The workers of a site share one copy of the weights, which all of them map into memory."
NUM_PROMPTS = 3
MAX_TOKENS = 8
LONG_TOKENS = 800  # of an answer that is interrupted
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def avx512() -> None:
    host = cpu_host()
    if not (host.has_kernels and host.has_gemm("float32")):
        pytest.skip("needs a CPU with AVX-512: without it all workers compute the same bits")


@contextlib.contextmanager
def running(folder: Path, mode: Mode, *workers: str) -> Iterator[ChaosCluster]:
    """Only decode-1 computes without AVX-512."""
    cluster = ChaosCluster(
        folder,
        step_s=None,
        worker_options={"dtype": "float32", "mode": mode},
        services=("scheduler-1", "gateway-1", *workers),
        environ_of={"decode-1": WITHOUT_AVX512},
    )
    try:
        asyncio.run(cluster.start())
        yield cluster
    finally:
        cluster.stop()


def client_of(cluster: ChaosCluster) -> httpx.Client:
    headers = {"Authorization": f"Bearer {cluster.api_key}"}
    url = cluster.urls["gateway-1"]
    return httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False)


def body(prompt: str, num_tokens: int, **fields: object) -> dict[str, object]:
    options = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return {"model": DEMO_MODEL_NAME, "prompt": prompt, **options, **fields}


def complete(cluster: ChaosCluster, prompt: str) -> dict[str, Any]:
    """Returns what served this prompt; the response is complete."""
    with client_of(cluster) as client:
        response = client.post("/v1/completions", json=body(prompt, MAX_TOKENS))
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["completion_tokens"] == MAX_TOKENS
    served: dict[str, Any] = answer["hearth"]
    return served


def status_of(cluster: ChaosCluster) -> dict[str, dict[str, Any]]:
    """The rows of `hearth status` by process."""
    command = ("status", "--once", "--json")
    status = start_hearth(cluster.folder, *command, HEARTH_NATS_URL=cluster.nats_url)
    output, _ = status.communicate(timeout=WAIT_S)
    assert status.returncode in (0, 1), output  # 1: a worker is lost
    found = json.loads(output)
    return {row["process_id"]: row for row in found["workers"] + found["services"]}


def busy_worker(cluster: ChaosCluster) -> str:
    def busy(newest: dict[str, Heartbeat]) -> list[str]:
        return [name for name, each in newest.items() if each.load and each.load.num_running]

    received = receive_heartbeats(
        cluster.nats_url, MONITOR, lambda newest: bool(busy(newest)), DEADLINE_S
    )
    (name,) = busy(asyncio.run(received))
    return name


def counted(cluster: ChaosCluster, name: str) -> int:
    with client_of(cluster) as client:
        text = client.get("/metrics").text
    found = re.search(rf"^hearth_gateway_{name}_total(?:{{.*}})? (\d+)", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def served_until(
    cluster: ChaosCluster, condition: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """Sends new prompts. A worker that starts on a busy machine may look stuck, and be passed over
    as if it were not there: how many prompts that takes is not known.
    """
    served: list[dict[str, Any]] = []

    def is_met() -> bool:
        served.append(complete(cluster, f"Site {len(served)}. {TEXT}"))
        return condition(served)

    eventually(is_met, "such answers", DEADLINE_S)
    return served


def test_exact_decode_computes_the_prompts_and_they_are_counted(tmp_path: Path) -> None:
    with running(tmp_path, "exact", "prefill-1", "decode-1") as cluster:
        served = served_until(
            cluster, lambda served: counted(cluster, "unlike_prefills") >= NUM_PROMPTS
        )
        assert {(each["prefill_worker"], each["num_pushed_tokens"]) for each in served} == {
            (None, 0)
        }
        row = status_of(cluster)["gateway-1"]
        assert row["num_unlike_prefills"] == counted(cluster, "unlike_prefills") <= len(served)
        assert "prefill_attempt_failed" not in cluster.log_of("decode-1"), "none was tried"


def test_fast_decode_uses_the_pushed_kv(tmp_path: Path) -> None:
    with running(tmp_path, "fast", "prefill-1", "decode-1") as cluster:
        served_until(
            cluster,
            lambda served: sum(each["num_pushed_tokens"] > 0 for each in served) >= NUM_PROMPTS,
        )
        assert counted(cluster, "unlike_prefills") == 0


def test_stream_that_only_unlike_hardware_can_resume_is_counted(tmp_path: Path) -> None:
    with (
        running(tmp_path, "exact", "decode-1", "decode-2") as cluster,
        client_of(cluster) as client,
    ):
        request = body(TEXT, LONG_TOKENS, stream=True, stream_options={"include_usage": True})
        with client.stream("POST", "/v1/completions", json=request) as response:
            lines = response.iter_lines()
            next(lines)
            victim = busy_worker(cluster)
            cluster.kill(victim)
            chunks = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
        assert chunks[-1]["usage"]["completion_tokens"] == LONG_TOKENS
        assert chunks[-1]["hearth"]["num_resubmissions"] >= 1
        assert chunks[-1]["hearth"]["decode_worker"] != victim
        row = status_of(cluster)["gateway-1"]
        assert row["num_numerics_changes"] == counted(cluster, "numerics_changes") >= 1
