"""Recovery from lost workers, messages and schedulers, as seen by an HTTP client."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.streams import early_entries, streams
from services.gateway.text.model_files import ModelFiles
from shared import subjects
from shared.config import GatewayConfig
from shared.errors import WorkerBusy
from shared.messages import AbortRequest, Finish, Served, TokenBatch, TokenEntry
from shared.packing import unpack_token_ids
from shared.transport.bus import failure_of
from tests.services.gateway.conftest import ANSWER, Cluster, running_cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT, events_of, text_of
from tests.services.gateway.samples import sample_sum
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S, until

WAIT_S = LIMIT_S


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and keepalives that are late count as lost sooner."""
    monkeypatch.setattr(streams, "TOKEN_TIMEOUT_S", 0.5)
    monkeypatch.setattr(streams, "KEEPALIVE_LIMIT_S", 0.7)


async def emitted(cluster: Cluster, worker: int, position: int) -> None:
    """Waits until the worker has emitted the token at `position`."""
    async with asyncio.timeout(WAIT_S):
        while (await cluster.decodes[worker].emitted.get()).first_position < position:
            pass


def num_resubmissions(events: list[Any]) -> int:
    """Unlike the number of submits, excludes submits repeated because the reply was too late."""
    found: int = events[-2]["hearth"]["num_resubmissions"]
    return found


async def wait_for_first_token(cluster: Cluster) -> None:
    """Waits for a token at the gateway: `emitted` does not prove that `Placed` arrived there."""
    found = cluster.gateway._driver._streams._by_request
    await until(lambda: all(each.queue.has_output for each in found.values()))


@pytest.mark.parametrize("is_killed", [True, False])
async def test_lost_worker_is_replaced(cluster: Cluster, is_killed: bool) -> None:
    """The worker is killed, or hangs: heartbeats continue, the step counter does not change."""
    before = sample_sum(cluster.gateway, "hearth_resubmissions_total")
    first, second = cluster.decodes
    first.hold_at = 9
    running = asyncio.create_task(events_of(cluster, stream_options={"include_usage": True}))
    await emitted(cluster, 0, 8)
    if is_killed:
        await first.die()
    else:
        first.is_hung = True
    async with asyncio.timeout(WAIT_S):
        events = await running
    assert text_of(events) == ANSWER
    assert events[-2]["hearth"]["decode_worker"] == "decode-2"
    assert events[-2]["hearth"]["num_resubmissions"] == 1
    assert events[-2]["usage"]["completion_tokens"] == len(second.answer)
    submit = await cluster.scheduler.submits.get()
    resubmit = await cluster.scheduler.submits.get()
    assert resubmit.excluded_workers == ("decode-1",)
    assert unpack_token_ids(resubmit.request.choices[0].output_token_ids) == first.answer[:9]
    assert resubmit.request.sampling.seed == submit.request.sampling.seed
    assert resubmit.attempt > submit.attempt
    assert second.emitted.get_nowait().first_position == 9
    assert sample_sum(cluster.gateway, "hearth_resubmissions_total") == before + 1
    if is_killed:
        return
    first.is_hung = False
    assert (await first.aborts.get()).reason == "superseded"  # fenced when it resumes


async def test_stopping_worker_is_replaced_at_once(cluster: Cluster) -> None:
    first = cluster.decodes[0]
    first.hold_at = 5
    running = asyncio.create_task(events_of(cluster))
    await emitted(cluster, 0, 4)
    await wait_for_first_token(cluster)
    cluster.scheduler.workers = cluster.decodes[1:]
    await first.stop()
    async with asyncio.timeout(WAIT_S):
        assert text_of(await running) == ANSWER


async def test_no_scheduler_is_503_before_the_window_of_others_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SUBMIT_WINDOW_S", LIMIT_S)
    await cluster.scheduler.stop()
    started = time.monotonic()
    response = await cluster.http.post(CHAT, json=BODY)
    assert response.status_code == 503
    assert float(response.headers["retry-after"]) > 0
    assert time.monotonic() - started < LIMIT_S / 2


async def test_lost_token_message_is_resent(cluster: Cluster) -> None:
    to_lose = {3, 4, 11}

    def loses(entry: TokenEntry) -> bool:
        is_lost = entry.first_position in to_lose
        to_lose.discard(entry.first_position)
        return is_lost

    cluster.decodes[0].loses = loses
    events = await events_of(cluster, stream_options={"include_usage": True})
    assert text_of(events) == ANSWER
    assert num_resubmissions(events) == 0


async def test_lost_messages_of_several_choices_are_resent(cluster: Cluster) -> None:
    """One lost message is the Finish of a choice while the other choices continue."""
    decode = cluster.decodes[0]
    decode.answers = {1: decode.answer[:7]}
    to_lose = {(0, 3), (1, 3), (1, 7), (2, 0)}

    def loses(entry: TokenEntry) -> bool:
        place = (entry.choice_index, entry.first_position)
        is_lost = place in to_lose
        to_lose.discard(place)
        return is_lost

    decode.loses = loses
    async with asyncio.timeout(WAIT_S):
        body = (await cluster.http.post(CHAT, json={**BODY, "n": 3})).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert (texts[0], texts[2]) == (ANSWER, ANSWER)
    assert ANSWER.startswith(texts[1])
    assert body["usage"]["completion_tokens"] == 2 * len(decode.answer) + 7
    assert body["hearth"]["num_resubmissions"] == 0


@pytest.mark.usefixtures("quick")
async def test_lost_finish_is_resent(cluster: Cluster) -> None:
    cluster.decodes[0].loses = lambda entry: entry.finish is not None
    async with asyncio.timeout(WAIT_S):
        events = await events_of(cluster)
    assert text_of(events) == ANSWER
    assert await cluster.decodes[0].acks.get()


@pytest.mark.usefixtures("quick")
async def test_unknown_placement_is_resubmitted(cluster: Cluster) -> None:
    first = cluster.decodes[0]
    first.hold_at = 5
    running = asyncio.create_task(events_of(cluster, stream_options={"include_usage": True}))
    await emitted(cluster, 0, 4)
    first.runs.clear()
    first.hold_at = None
    async with asyncio.timeout(WAIT_S):
        events = await running
    assert text_of(events) == ANSWER
    assert num_resubmissions(events) == 1


async def test_request_continues_after_worker_busy(cluster: Cluster) -> None:
    first = cluster.decodes[0]
    first.answer = first.answer[:7]
    first.finish = Finish(
        reason="failed",
        served=Served(num_cached_tokens=0, prefill_worker_id=None),
        failure=failure_of(WorkerBusy("draining")),
    )
    assert text_of(await events_of(cluster)) == ANSWER


@pytest.mark.usefixtures("quick")
async def test_missing_keepalive_resubmits(cluster: Cluster) -> None:
    scheduler = cluster.scheduler
    scheduler.is_holding, scheduler.sends_keepalives = True, False
    running = asyncio.create_task(cluster.http.post(CHAT, json=BODY))
    await scheduler.submits.get()
    async with asyncio.timeout(WAIT_S):
        await scheduler.submits.get()
        assert await scheduler.cancels.get()
        scheduler.is_holding = False
        assert (await running).status_code == 200


async def test_keepalives_prevent_resubmission(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins the time of the next anew."""
    monkeypatch.setattr(streams, "KEEPALIVE_LIMIT_S", LIMIT_S)
    cluster.scheduler.is_holding = True
    running = asyncio.create_task(cluster.http.post(CHAT, json=BODY))
    request_id = (await cluster.scheduler.submits.get()).request.request_id
    open_streams = cluster.gateway._driver._streams._by_request
    await until(lambda: open_streams[request_id].keepalive_at)
    for _ in range(3):
        before = open_streams[request_id].keepalive_at
        await until(lambda: open_streams[request_id].keepalive_at > before)  # noqa: B023
    assert cluster.scheduler.submits.empty()
    cluster.scheduler.is_holding = False
    assert (await running).status_code == 200


@pytest.mark.parametrize("is_stream", [True, False])
async def test_client_disconnect_aborts_placement(cluster: Cluster, is_stream: bool) -> None:
    gone = partial(sample_sum, cluster.gateway, "hearth_requests_total", outcome="client_gone")
    before = gone()
    cluster.decodes[0].hold_at = 5
    body = {**BODY, "stream": is_stream}
    running = asyncio.create_task(cluster.http.post(CHAT, json=body))
    await emitted(cluster, 0, 4)
    await wait_for_first_token(cluster)
    running.cancel()
    async with asyncio.timeout(WAIT_S):
        assert (await cluster.decodes[0].aborts.get()).reason == "client_gone"
        await cluster.http.get("/health")
    assert gone() == before + 1
    assert sample_sum(cluster.gateway, "hearth_gateway_open_streams") == 0


async def test_client_disconnect_cancels_queued_request(cluster: Cluster) -> None:
    cluster.scheduler.is_holding = True
    running = asyncio.create_task(cluster.http.post(CHAT, json=BODY))
    message = await cluster.scheduler.submits.get()
    await until(lambda: message.request.request_id in cluster.scheduler.queued)
    running.cancel()
    async with asyncio.timeout(WAIT_S):
        assert await cluster.scheduler.cancels.get() == message.request.request_id


async def test_foreign_placement_is_aborted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_entries, "EARLY_LIMIT_S", 0.2)
    worker = cluster.decodes[0]
    entry = TokenEntry(b"f" * 16, 0, 0, (5, 6))
    batch = TokenBatch(worker_id=worker.worker_id, entries=(entry,))
    await worker.bus.publish(subjects.tokens("gateway-1"), batch)
    async with asyncio.timeout(WAIT_S):
        abort = await worker.aborts.get()
    assert abort == AbortRequest(placement_id=b"f" * 16, reason="fenced")


async def test_second_placement_is_superseded(cluster: Cluster) -> None:
    first, second = cluster.decodes
    first.hold_at = 5
    running = asyncio.create_task(events_of(cluster))
    await emitted(cluster, 0, 4)
    request = (await cluster.scheduler.submits.get()).request
    second.hold_at = 0
    placement_id = await cluster.scheduler.place(request, second)
    async with asyncio.timeout(WAIT_S):
        abort = await second.aborts.get()
    assert abort == AbortRequest(placement_id=placement_id, reason="superseded")
    first.released.set()
    assert text_of(await running) == ANSWER


@pytest.mark.usefixtures("no_shared_cluster", "quick")
async def test_bus_restart_does_not_resubmit(
    tmp_path: Path, gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    """Neither the request whose tokens are lost meanwhile, nor the other one."""
    server = NatsServer(tmp_path)
    config = msgspec.structs.replace(gateway_config, nats_url=server.url("gateway-1"))
    async with running_cluster(server, config, model_files) as cluster:
        first = cluster.decodes[0]
        first.hold_at = 5
        options = {"stream_options": {"include_usage": True}}
        running = [asyncio.create_task(events_of(cluster, **options))]
        await emitted(cluster, 0, 4)
        lossy = set(first.placed)
        running.append(asyncio.create_task(events_of(cluster, **options)))
        await emitted(cluster, 0, 4)
        first.loses = lambda entry: (
            entry.placement_id in lossy and entry.first_position in (5, 6, 7)
        )
        await wait_for_first_token(cluster)
        server.stop()
        await until(lambda: cluster.gateway.readiness().reason == "not connected to the bus")
        assert (await cluster.http.get("/ready")).status_code == 503
        await asyncio.sleep(1.5)  # longer than every silence timeout
        server.start()
        first.released.set()
        async with asyncio.timeout(WAIT_S):
            for events in await asyncio.gather(*running):
                assert text_of(events) == ANSWER
                assert num_resubmissions(events) == 0
    server.stop()


async def test_slow_client_receives_complete_stream(cluster: Cluster) -> None:
    body = {**BODY, "stream": True}
    async with cluster.http.stream("POST", CHAT, json=body) as response:
        await cluster.decodes[0].acks.get()  # all tokens are generated before the client reads
        text = (await response.aread()).decode()
    assert text.endswith("data: [DONE]\n\n")
