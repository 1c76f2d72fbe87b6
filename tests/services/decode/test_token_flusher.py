"""When tokens are sent: at once, or together with the tokens of the next short steps."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import msgspec
import pytest

from services.decode.token_flusher import ENTRY_INTERVAL_S, INTERVAL_S
from shared.engine.executors.timing_executor import StepCost
from shared.messages import TokenBatch
from shared.subjects import tokens
from tests.services.decode.test_handoff import PROMPT, Cluster, cluster
from tests.support.world.clock import run
from tests.support.world.workers import request_of

NUM_TOKENS = 40
WIDE = {"max_sequences": 200, "max_batch_tokens": 800, "num_blocks": 16_384}


def every_step(base_s: float) -> StepCost:
    return StepCost(base_s=base_s, per_token_s=0.0, per_context_token_s=0.0)


def record_sent(it: Cluster) -> list[tuple[float, TokenBatch]]:
    """Returns a list to which each later token batch is added, with its time in seconds."""
    sent: list[tuple[float, TokenBatch]] = []

    def tap(sender: str, subject: str, data: bytes) -> None:
        if subject == tokens("gateway-1"):
            batch = msgspec.msgpack.decode(data, type=TokenBatch)
            sent.append((asyncio.get_running_loop().time(), batch))

    it.network.taps.append(tap)
    return sent


async def sent_for(it: Cluster, num_requests: int) -> list[tuple[float, TokenBatch]]:
    sent = record_sent(it)
    request = request_of(PROMPT[:4], max_tokens=NUM_TOKENS)
    placed = [await it.peer.place("decode-1", request) for _ in range(num_requests)]
    for placement_id in placed:
        received = await it.peer.finished(placement_id)
        assert len(received.output) == NUM_TOKENS and received.finish.reason == "length"
        await it.peer.acknowledge("decode-1", placement_id)
    await it.settled()
    return sent


@pytest.mark.parametrize("step_s", [0.005, 0.002])
def test_steps_of_2_ms_or_more_are_sent_at_once(step_s):
    async def main():
        async with cluster(cost=every_step(step_s)) as it:
            sent = await sent_for(it, 1)
            assert [len(batch.entries[0].token_ids) for _, batch in sent] == [1] * NUM_TOKENS
            for (before, _), (at, _) in pairwise(sent):
                assert at - before == pytest.approx(step_s)

    run(main())


@pytest.mark.parametrize("step_s", [0.0, 0.0001, 0.0004])
def test_short_steps_are_sent_together_but_first_token_at_once(step_s):
    async def main():
        async with cluster(cost=every_step(step_s)) as it:
            began_at = asyncio.get_running_loop().time()
            sent = await sent_for(it, 1)
            (first_at, first), *others = sent
            assert len(first.entries[0].token_ids) == 1
            assert first_at == pytest.approx(began_at + it.network.latency_s + step_s)
            assert len(others) <= NUM_TOKENS * step_s / INTERVAL_S + 1
            times = [at for at, _ in sent]
            gaps = [b - a for a, b in pairwise(times)]
            # a timer or the next step ends the wait; the last tokens do not wait
            assert all(INTERVAL_S - 1e-9 <= gap <= INTERVAL_S + step_s for gap in gaps[:-1])
            last_step_at = began_at + it.network.latency_s + NUM_TOKENS * step_s
            assert times[-1] == pytest.approx(last_step_at, abs=1e-6)

    run(main())


def test_long_step_does_not_delay_tokens_of_earlier_steps():
    async def main():
        async with cluster(cost=every_step(0.0003)) as it:
            placement_id = await it.peer.place("decode-1", request_of(PROMPT[:4]))
            await it.peer.has_tokens(placement_id, 5)
            it.decode.executor._cost = every_step(0.5)
            await asyncio.sleep(3 * INTERVAL_S)  # virtual: last short step, flush interval, latency
            num_sampled = it.decode.engine.num_generated_tokens
            assert 5 < num_sampled < 20
            assert len(it.peer.of(placement_id).output) == num_sampled

    run(main())


def test_concurrent_requests_share_messages():
    async def main():
        async with cluster(cost=every_step(0.0002)) as it:  # long enough that they overlap
            sent = await sent_for(it, 8)
            assert len(sent) < 8 * 3
            assert max(len(batch.entries) for _, batch in sent) > 1

    run(main())


def test_flush_interval_grows_with_running_requests():
    async def main():
        async with cluster(cost=every_step(0.0005), **WIDE) as it:
            request = request_of(PROMPT[:4], max_tokens=1000)
            for _ in range(120):
                placement_id = await it.peer.place("decode-1", request)
            await it.peer.has_tokens(placement_id, 9)
            sent = record_sent(it)
            await asyncio.sleep(0.05)  # virtual
            assert len(sent) > 15
            assert [len(batch.entries) for _, batch in sent] == [120] * len(sent)
            for (before, _), (at, _) in pairwise(sent):
                gap_s = 120 * ENTRY_INTERVAL_S
                assert gap_s > INTERVAL_S and gap_s - 1e-9 <= at - before <= gap_s + 0.0005

    run(main())


def test_first_token_is_sent_without_waiting_for_others():
    async def main():
        async with cluster(cost=every_step(0.0001), **WIDE) as it:
            sent = record_sent(it)
            request = request_of(PROMPT[:4], max_tokens=1000)
            for _ in range(80):
                await it.peer.place("decode-1", request)
            joined = await it.peer.place("decode-1", request_of(PROMPT[:4]))
            began_at = asyncio.get_running_loop().time()
            await it.peer.has_tokens(joined, 1)
            at, first = next(
                (at, batch)
                for at, batch in sent
                if joined in [entry.placement_id for entry in batch.entries]
            )
            assert at - began_at <= 0.0002
            assert [entry.placement_id for entry in first.entries] == [joined]

    run(main())
