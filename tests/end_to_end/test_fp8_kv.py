"""Workers that run prefill and decode handlers over one engine each, with KV in FP8: whatever
happens to a request, its text is that of one worker alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.local.credentials import Credential
from shared.errors import WorkerUnfit
from shared.kv_layout import FP8
from shared.messages import (
    Done,
    Heartbeat,
    Message,
    ParkWorker,
    PrefillAccepted,
    RunPrefill,
    WakeWorker,
)
from shared.packing import pack_token_ids
from shared.subjects import lifecycle, run_prefill
from shared.transport.bus import NatsBus
from tests.end_to_end.test_chat import text_of
from tests.support.cluster.model_cluster import ModelCluster, RenewedCluster, run_model

pytestmark = pytest.mark.long
KV_CACHE_BYTES = 13 * 24_576  # 208 tokens in FP8, of each worker
TEXT = "is told in many words, so that its KV fills more than one block of tokens of the cache."
QUESTIONS = [f"{each} {TEXT} What is it?" for each in ("A prefix", "A worker", "The gateway")]
OPTIONS = {"max_tokens": 50, "ignore_eos": True, "temperature": 1, "seed": 7}
WORKERS, BF16 = ("worker-1", "worker-2"), "prefill-9"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def renewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RenewedCluster]:
    fp8 = {"kv-dtype": "fp8", "kv-cache-bytes": str(KV_CACHE_BYTES)}
    bf16 = {"kv-dtype": "bf16", "kv-cache-bytes": str(2 * KV_CACHE_BYTES)}

    def start() -> AbstractContextManager[ModelCluster]:
        folder, workers = tmp_path_factory.mktemp("cluster"), (*WORKERS, BF16)
        return run_model(folder, DEMO_MODEL_DIR, workers, fp8, options_of={BF16: bf16})

    with RenewedCluster(start) as found:
        yield found


@pytest.fixture
def cluster(renewed: RenewedCluster) -> ModelCluster:
    return renewed.cluster()


@pytest.fixture(scope="module")
def expected(renewed: RenewedCluster) -> dict[str, str]:
    """Each alone on the only worker, which computes its prompt. Ends with empty caches."""
    cluster = renewed.cluster()
    park(cluster, "worker-2")
    answers = [ask(cluster, each) for each in QUESTIONS]
    assert [each["hearth"]["prefill_worker"] for each in answers] == [None] * len(QUESTIONS)
    assert [each["hearth"]["num_preemptions"] for each in answers] == [0] * len(QUESTIONS)
    wake(cluster, "worker-2")
    park(cluster, "worker-1")
    wake(cluster, "worker-1")
    return dict(zip(QUESTIONS, map(content_of, answers), strict=True))


def ask(cluster: ModelCluster, question: str) -> dict:
    return cluster.complete(question, **OPTIONS)


def content_of(answer: dict) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def park(cluster: ModelCluster, worker_id: str) -> None:
    command = ParkWorker(drain_s=TIMEOUT_S)
    send(cluster, "scheduler-1", lifecycle("decode", worker_id), command, Done)
    until_state(cluster, worker_id, "standby")


def wake(cluster: ModelCluster, worker_id: str) -> None:
    command = WakeWorker(kv_bytes=KV_CACHE_BYTES)
    send(cluster, "scheduler-1", lifecycle("decode", worker_id), command, Done)
    until_state(cluster, worker_id, "ready")


def until_state(cluster: ModelCluster, process_id: str, state: str) -> dict[str, Heartbeat]:
    return cluster.wait_for_heartbeats(
        lambda newest: process_id in newest and newest[process_id].state == state,
        timeout_s=TIMEOUT_S,
    )


def send(
    cluster: ModelCluster, sender: str, subject: str, command: Message, reply_type: type[Message]
) -> None:
    """As the process `sender` would."""

    async def request() -> None:
        bus = await NatsBus.connect(url_of(cluster, sender), process_id=sender)
        try:
            await bus.request(subject, command, reply_type, timeout_s=TIMEOUT_S)
        finally:
            await bus.close()

    asyncio.run(request())


def url_of(cluster: ModelCluster, process_id: str) -> str:
    credentials: dict[str, Credential] = {
        each.process_id: each for each in cluster.state.credentials
    }
    return credentials[process_id].nats_url(cluster.state.nats_host, cluster.state.nats_port)


def test_prompt_that_the_other_worker_computes_and_one_that_is_cached(
    cluster: ModelCluster, expected: dict[str, str]
) -> None:
    for count in range(2):
        answers = {each: ask(cluster, each) for each in QUESTIONS}
        assert {each: content_of(answer) for each, answer in answers.items()} == expected
        for answer in answers.values():
            usage, served = answer["usage"], answer["hearth"]
            assert served["decode_worker"] in WORKERS
            if count == 0:
                assert served["prefill_worker"] in {*WORKERS} - {served["decode_worker"]}
                assert served["num_pushed_tokens"] > 0
            else:
                assert usage["prompt_tokens_details"]["cached_tokens"] >= 16


def test_preempted_answers(cluster: ModelCluster, expected: dict[str, str]) -> None:
    """Three on one worker, whose cache holds less than all of them."""
    park(cluster, "worker-2")
    with ThreadPoolExecutor(len(QUESTIONS)) as clients:
        answers = list(clients.map(lambda each: ask(cluster, each), QUESTIONS))
    wake(cluster, "worker-2")
    assert [content_of(each) for each in answers] == list(expected.values())
    assert sum(each["hearth"]["num_preemptions"] for each in answers) > 0


def test_no_kv_of_a_worker_that_stores_another_dtype(
    cluster: ModelCluster, expected: dict[str, str]
) -> None:
    """The only one that could compute the prompt is not asked to, and would refuse."""
    park(cluster, "worker-2")
    newest = until_state(cluster, BF16, "ready")
    answer = ask(cluster, QUESTIONS[0] + " ")
    assert answer["hearth"]["prefill_worker"] is None
    assert answer["hearth"]["num_pushed_tokens"] == 0
    newest = until_state(cluster, "worker-1", "ready")
    card = newest["worker-1"].model
    assert card is not None and card.numerics.kv_dtype == FP8
    command = RunPrefill(
        request_id="r",
        placement_id=b"p" * 16,
        tenant_id="t",
        decode_worker_id="worker-1",
        model=card.name,
        revision=card.revision,
        kv_format=card.kv_format,
        cache_root=bytes(16),
        token_ids=pack_token_ids([1, 2, 3]),
        block_hashes=b"",
        first_token=0,
        targets=newest["worker-1"].kv_targets,
        lease_s=1.0,
        deadline_s=1.0,
        numerics=card.numerics,
    )
    with pytest.raises(WorkerUnfit, match=f"kv_format {card.kv_format} differs from this worker's"):
        send(cluster, "worker-1", run_prefill(BF16), command, PrefillAccepted)
    wake(cluster, "worker-2")


def test_answer_that_another_worker_resumes(
    cluster: ModelCluster, expected: dict[str, str]
) -> None:
    """The worker that has the prompt in its cache dies; there is no successor."""
    victim = ask(cluster, QUESTIONS[0])["hearth"]["decode_worker"]
    stream = cluster.stream(QUESTIONS[0], **OPTIONS)
    chunks = [next(stream) for _ in range(10)]
    cluster.kill(victim)
    chunks += list(stream)
    assert text_of(chunks) == expected[QUESTIONS[0]]
    assert chunks[-1]["hearth"]["num_resubmissions"] >= 1
    assert chunks[-1]["hearth"]["decode_worker"] != victim
