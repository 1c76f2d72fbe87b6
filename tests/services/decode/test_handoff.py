"""The handoff from prefill to decode on the simulated network, with all its failures; no failure
leaks blocks.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from shared.engine.executors.timing_executor import StepCost
from shared.errors import (
    ContextFull,
    HearthError,
    InvalidRequest,
    UnknownPlacement,
    WorkerBusy,
    WorkerUnfit,
)
from shared.messages import PrefillAccepted, PrefillFailed, RunPrefill
from shared.subjects import run_prefill
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import run
from tests.support.world.kv_link import DataPlane
from tests.support.world.workers import Peer, SimulatedWorker, request_of

PROMPT = list(range(100, 350))  # 250 tokens: several chunks of 64, not a multiple of the block size


class Cluster:
    def __init__(self, **options) -> None:
        self.network = SimulatedNetwork()
        data_plane = DataPlane()
        self.peer = Peer(self.network)
        self.prefills = [
            SimulatedWorker(self.network, data_plane, f"prefill-{i}", ("prefill",), **options)
            for i in (1, 2)
        ]
        self.decode = SimulatedWorker(self.network, data_plane, "decode-1", ("decode",), **options)
        self.workers = [*self.prefills, self.decode]

    async def run(self, request, candidates=("prefill-1",)):
        placement_id = await self.peer.place("decode-1", request, candidates)
        return await self.peer.finished(placement_id)

    async def settled(self) -> None:
        """Waits until every live worker is idle and all its blocks are free."""
        async with asyncio.timeout(60):
            while not all(worker.is_empty for worker in self.workers):
                await asyncio.sleep(0.05)  # virtual


@asynccontextmanager
async def cluster(**options):
    made = Cluster(**options)
    for each in (made.peer, *made.workers):
        await each.start()
    await asyncio.sleep(2)  # virtual: heartbeats have arrived, health monitors judge peers
    try:
        yield made
    finally:
        for each in (*made.workers, made.peer):
            await each.stop()


def outputs_of(request, *, candidates, **options) -> list[int]:
    async def main():
        async with cluster(**options) as it:
            received = await it.run(request, candidates)
            assert received.finish.reason == "length"
            await it.settled()
            return received.output

    return run(main())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 15, 16, 17, 18, 250])
def test_disaggregated_output_equals_local_output(num_prompt_tokens, temperature):
    request = request_of(PROMPT[:num_prompt_tokens], temperature=temperature)
    local = outputs_of(request, candidates=())
    assert len(local) == 20
    assert outputs_of(request, candidates=("prefill-1",)) == local
    assert outputs_of(request, candidates=("prefill-1",), max_batch_tokens=7) == local


def test_resumed_output_continues_where_it_stopped():
    full = outputs_of(request_of(PROMPT), candidates=())
    resumed = outputs_of(request_of(PROMPT, output=full[:8]), candidates=("prefill-1",))
    assert resumed == full[8:]


def test_prefill_pushes_all_prompt_tokens_but_the_last():
    async def main():
        async with cluster() as it:
            received = await it.run(request_of(PROMPT))
            served = received.finish.served
            assert served.prefill_worker_id == "prefill-1"
            assert served.num_pushed_tokens == len(PROMPT) - 1
            assert served.num_cached_tokens == 0
            again = await it.run(request_of([*PROMPT, 7, 8, 9]))
            # decode has 15 full blocks in its cache and requests only the rest
            assert again.finish.served.num_pushed_tokens == 252 - 240
            assert again.finish.served.num_cached_tokens == 240

    run(main())


def test_tenants_do_not_share_cached_blocks():
    async def main():
        async with cluster() as it:
            await it.run(request_of(PROMPT))
            other = await it.run(request_of(PROMPT, tenant_id="tenant-b"))
            assert other.finish.served.num_cached_tokens == 0
            assert other.finish.served.num_pushed_tokens == len(PROMPT) - 1

    run(main())


def test_missing_prefill_worker_falls_back_to_next_or_local():
    expected = outputs_of(request_of(PROMPT), candidates=())

    async def main():
        async with cluster() as it:
            next_one = await it.run(request_of(PROMPT), ("prefill-9", "prefill-2"))
            assert next_one.finish.served.prefill_worker_id == "prefill-2"
            assert next_one.output == expected
            local = await it.run(request_of(PROMPT, tenant_id="b"), ("prefill-9",))
            assert local.finish.served.prefill_worker_id is None
            assert local.output == expected
            await it.settled()

    run(main())


@pytest.mark.parametrize("candidates", [("prefill-1",), ("prefill-1", "prefill-2")])
def test_prefill_killed_midway_loses_no_token(candidates):
    expected = outputs_of(request_of(PROMPT), candidates=())

    async def main():
        async with cluster(cost=StepCost(base_s=0.5)) as it:
            placement_id = await it.peer.place("decode-1", request_of(PROMPT), candidates)
            await asyncio.sleep(0.8)  # the first chunk is pushed, the second computes
            await it.prefills[0].kill()
            it.workers.remove(it.prefills[0])
            received = await it.peer.finished(placement_id)
            assert received.output == expected
            served = received.finish.served
            used = served.prefill_worker_id
            assert used == ("prefill-2" if len(candidates) == 2 else None)
            (partial,) = served.partial_pushes
            assert partial.worker_id == "prefill-1"
            assert 64 <= partial.num_tokens < len(PROMPT) - 1
            assert served.num_pushed_tokens == (len(PROMPT) - 1 if used else partial.num_tokens)
            await it.settled()

    run(main())


def test_frozen_prefill_is_replaced_by_the_next_candidate():
    expected = outputs_of(request_of(PROMPT), candidates=())

    async def main():
        async with cluster(cost=StepCost(base_s=0.5)) as it:
            candidates = ("prefill-1", "prefill-2")
            placement_id = await it.peer.place("decode-1", request_of(PROMPT), candidates)
            await asyncio.sleep(0.2)
            assert it.decode.worker.health_monitor.describe().load.num_handoffs_in_flight == 1
            it.network.freeze("prefill-1")
            it.prefills[0].executor._cost = StepCost(base_s=20.0)  # its step hangs, too
            received = await it.peer.finished(placement_id)
            assert received.output == expected
            assert received.finish.served.prefill_worker_id == "prefill-2"
            it.network.thaw("prefill-1")
            await it.settled()
            assert it.decode.worker.health_monitor.describe().load.num_handoffs_in_flight == 0

    run(main())


def test_prefill_frozen_before_it_replies_is_replaced_once_it_is_lost():
    """It is far, so that the timeout, which follows the distance, is 1.7 s."""

    async def main():
        async with cluster() as it:
            now = asyncio.get_running_loop().time()
            it.decode.worker.health_monitor.requests.round_trips.record("prefill-1", 0.49, now)
            it.network.freeze("prefill-1")
            started_at = asyncio.get_running_loop().time()
            received = await it.run(request_of(PROMPT), ("prefill-1", "prefill-2"))
            assert received.finish.served.prefill_worker_id == "prefill-2"
            assert asyncio.get_running_loop().time() - started_at < 1.5
            it.network.thaw("prefill-1")
            await it.settled()

    run(main())


def test_expired_prefill_lease_falls_back_to_local_prefill():
    expected = outputs_of(request_of(PROMPT), candidates=())

    async def main():
        async with cluster(cost=StepCost(base_s=2.0)) as it:
            placement_id = await it.peer.place("decode-1", request_of(PROMPT), ("prefill-1",))
            await asyncio.sleep(0.5)
            it.network.is_down = True  # no renewal arrives, so prefill's lease runs out
            await asyncio.sleep(5)
            assert it.prefills[0].is_empty
            it.network.is_down = False
            received = await it.peer.finished(placement_id)
            assert received.output == expected
            assert received.finish.served.prefill_worker_id is None
            await it.settled()

    run(main())


def test_requests_run_after_their_gateway_recovers():
    async def main():
        async with cluster(cost=StepCost(base_s=0.5)) as it:
            it.network.freeze("gateway-1")
            await asyncio.sleep(5)
            it.network.thaw("gateway-1")
            await asyncio.sleep(1)
            received = await it.run(request_of(PROMPT))
            assert received.finish.reason == "length"

    run(main())


def test_token_ids_outside_the_vocabulary_are_rejected():
    async def main():
        async with cluster() as it:
            requests = (
                request_of([*PROMPT, 32_000]),
                request_of(PROMPT, output=[2**32 - 1]),
                request_of(PROMPT, stop_token_ids=(32_000,)),
                request_of(PROMPT, stop_token_ids=(-1,)),
            )
            for request in requests:
                with pytest.raises(InvalidRequest, match="vocabulary"):
                    await it.peer.place("decode-1", request, ("prefill-1",))
            await it.settled()

    run(main())


def test_corrupt_frame_moves_prefill_to_the_next_candidate():
    expected = outputs_of(request_of(PROMPT), candidates=())

    async def main():
        async with cluster() as it:
            expect = it.decode.receiver.expect

            def corrupt_first(placement_id, sink, bounds, **options):
                expect(placement_id, sink, bounds, **options)
                it.decode.receiver.expect = expect
                it.decode.receiver.corrupt_next(placement_id)

            it.decode.receiver.expect = corrupt_first
            received = await it.run(request_of(PROMPT), ("prefill-1", "prefill-2"))
            assert received.output == expected
            assert received.finish.served.prefill_worker_id == "prefill-2"
            await it.settled()

    run(main())


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3, 0.6, 1.2, 2.4, 3.0])
def test_abort_in_any_phase_frees_all_blocks_on_both_workers(delay_s):
    async def main():
        async with cluster(cost=StepCost(base_s=0.5)) as it:
            placement_id = await it.peer.place("decode-1", request_of(PROMPT), ("prefill-1",))
            await asyncio.sleep(delay_s)
            await it.peer.abort("decode-1", placement_id)
            await it.peer.abort("decode-1", placement_id)
            await it.settled()
            with pytest.raises(UnknownPlacement):
                await it.peer.resend("decode-1", placement_id, 0)

    run(main())


def test_placement_aborted_before_it_arrives_is_rejected():
    async def main():
        async with cluster() as it:
            await it.peer.abort("decode-1", (1).to_bytes(16, "big"))
            with pytest.raises(WorkerBusy):
                await it.peer.place("decode-1", request_of(PROMPT))
            await it.settled()

    run(main())


def test_lost_tokens_are_resent_until_finish_is_acknowledged():
    async def main():
        async with cluster() as it:
            it.network.is_dropped = lambda subject, *_: subject.endswith(".tokens")
            placement_id = await it.peer.place("decode-1", request_of(PROMPT[:20]))
            await asyncio.sleep(5)
            assert it.peer.of(placement_id).output == []
            await it.peer.resend("decode-1", placement_id, 0)
            received = it.peer.of(placement_id)
            assert len(received.output) == 20 and received.finish.reason == "length"
            await it.peer.acknowledge("decode-1", placement_id)
            await asyncio.sleep(0.1)
            with pytest.raises(UnknownPlacement):
                await it.peer.resend("decode-1", placement_id, 0)

    run(main())


def test_finish_is_resent_until_acknowledged():
    async def main():
        async with cluster() as it:
            placement_id = await it.peer.place("decode-1", request_of(PROMPT), ())
            received = await it.peer.finished(placement_id)
            for _ in range(2):
                flushed_at, received.finish = asyncio.get_running_loop().time(), None
                await it.peer.finished(placement_id)
                assert asyncio.get_running_loop().time() - flushed_at < 2.5
            assert len(received.token_ids) == 20  # no token arrives twice
            await it.peer.acknowledge("decode-1", placement_id)
            received.finish = None
            await asyncio.sleep(5)
            assert received.finish is None

    run(main())


def test_acknowledged_placement_is_not_computed_any_further():
    """A second process with this worker's id has finished the answer: the gateway has all of it."""

    async def main():
        async with cluster() as it:
            placement_id = await it.peer.place("decode-1", request_of(PROMPT, max_tokens=200), ())
            received = await it.peer.has_tokens(placement_id, 3)
            await it.peer.acknowledge("decode-1", placement_id)
            await asyncio.sleep(0.1)
            assert all(worker.is_empty for worker in it.workers)
            assert len(received.token_ids) < 100

    run(main())


def test_placement_without_tokens_is_resent_too():
    """The gateway's abort may have been lost; only this message makes the gateway repeat it."""

    async def main():
        async with cluster(cost=StepCost(base_s=10.0)) as it:
            sent = []
            it.network.taps.append(lambda _, subject, __: sent.append(subject))
            placement_id = await it.peer.place("decode-1", request_of(PROMPT), ("prefill-1",))
            await asyncio.sleep(5)
            assert sum(subject.endswith(".tokens") for subject in sent) == 2
            received = it.peer.of(placement_id)
            assert (received.output, received.finish) == ([], None)
            await it.peer.abort("decode-1", placement_id)
            await it.settled()

    run(main())


def test_placements_of_a_lost_gateway_are_dropped():
    async def main():
        async with cluster(cost=StepCost(base_s=0.5)) as it:
            await it.peer.place("decode-1", request_of(PROMPT, max_tokens=10_000), ("prefill-1",))
            await asyncio.sleep(1)
            it.network.freeze("gateway-1")
            await it.settled()
            it.network.thaw("gateway-1")

    run(main())


def test_placements_of_a_restarted_gateway_are_dropped_at_once():
    async def main():
        async with cluster(cost=StepCost(base_s=0.05)) as it:
            await it.peer.place("decode-1", request_of(PROMPT, max_tokens=10_000), ("prefill-1",))
            await it.peer.stop()
            it.peer = Peer(it.network)
            await it.peer.start()
            async with asyncio.timeout(1):
                await it.settled()

    run(main())


def test_bus_outage_drops_no_placement():
    expected = outputs_of(request_of(PROMPT, max_tokens=200), candidates=())

    async def main():
        async with cluster(cost=StepCost(base_s=0.05)) as it:
            request = request_of(PROMPT, max_tokens=200)
            placement_id = await it.peer.place("decode-1", request, ("prefill-1",))
            await it.peer.has_tokens(placement_id, 5)
            it.network.is_down = True
            await asyncio.sleep(8)
            it.network.is_down = False
            await asyncio.sleep(8)
            await it.peer.resend("decode-1", placement_id, 0)
            assert it.peer.of(placement_id).output == expected

    run(main())


def test_deadline_frees_all_blocks():
    async def main():
        async with cluster(cost=StepCost(base_s=0.5)) as it:
            request = request_of(PROMPT, max_tokens=10_000, deadline_s=3.0)
            await it.peer.place("decode-1", request, ("prefill-1",))
            await it.settled()

    run(main())


def test_bad_requests_are_rejected():
    async def main():
        async with cluster() as it:
            for prompt in ([], list(range(9000))):
                with pytest.raises(InvalidRequest):
                    await it.peer.place("decode-1", request_of(prompt), ("prefill-1",))
            await it.settled()

    run(main())


def test_worker_refuses_for_itself_what_another_may_serve():
    async def main():
        async with cluster(num_blocks=32) as it:
            for change in ({"revision": "other"}, {"block_size": 32}):
                wrong = msgspec.structs.replace(request_of(PROMPT), **change)
                with pytest.raises(WorkerUnfit):
                    await it.peer.place("decode-1", wrong)
            for request in (request_of(list(range(513))), request_of(PROMPT, output=[5] * 263)):
                with pytest.raises(ContextFull):
                    await it.peer.place("decode-1", request, ("prefill-1",))
            await it.settled()

    run(main())


def test_end_of_the_pool_hands_the_request_back():
    """512 tokens of KV: the token sampled after the last of them needs no KV here."""

    async def main():
        async with cluster(num_blocks=32) as it:
            received = await it.run(request_of(PROMPT, max_tokens=264))
            assert (len(received.output), received.finish.reason) == (263, "failed")
            assert received.finish.failure.code == ContextFull.code
            received = await it.run(request_of(PROMPT, max_tokens=263))
            assert (len(received.output), received.finish.reason) == (263, "length")
            await it.settled()

    run(main())


def test_reservations_leave_room_for_running_sequences():
    async def main():
        async with cluster(num_blocks=64, cost=StepCost(base_s=0.5)) as it:
            placed, num_rejected = [], 0
            for index in range(6):
                request = request_of(PROMPT, tenant_id=f"t{index}")
                try:
                    placed.append(await it.peer.place("decode-1", request, ("prefill-1",)))
                except WorkerBusy:
                    num_rejected += 1
            assert len(placed) == 2 and num_rejected == 4  # 16 blocks each, half of 64
            for placement_id in placed:
                assert (await it.peer.finished(placement_id)).finish.reason == "length"
            await it.settled()

    run(main())


def test_drain_finishes_running_and_rejects_new_requests():
    async def main():
        async with cluster() as it:
            placement_id = await it.peer.place("decode-1", request_of(PROMPT), ("prefill-1",))
            draining = [asyncio.create_task(worker.drain()) for worker in it.workers]
            await asyncio.sleep(0.01)
            with pytest.raises(WorkerBusy):
                await it.peer.place("decode-1", request_of(PROMPT))
            received = await it.peer.finished(placement_id)
            assert received.finish.reason == "length"
            assert not draining[-1].done()  # the finish is not acknowledged yet
            await it.peer.acknowledge("decode-1", placement_id)
            await asyncio.gather(*draining)

    run(main())


def test_32_concurrent_streams_equal_their_solo_runs():
    prompts = [[1000 * n + i for i in range(5 + 13 * n)] for n in range(32)]
    solo = {}

    async def alone():
        async with cluster(num_blocks=1024) as it:
            for n, prompt in enumerate(prompts):
                received = await it.run(request_of(prompt, temperature=1.0, seed=n))
                solo[n] = received.output

    async def together():
        async with cluster(num_blocks=1024) as it:
            placed = [
                await it.peer.place(
                    "decode-1",
                    request_of(prompt, temperature=1.0, seed=n),
                    ("prefill-1", "prefill-2")[:: 1 if n % 2 else -1],
                )
                for n, prompt in enumerate(prompts)
            ]
            for n, placement_id in enumerate(placed):
                assert (await it.peer.finished(placement_id)).output == solo[n]
            await it.settled()

    run(alone())
    run(together())


def run_prefill_of(it, *, first_token=0):
    """The command for a prompt of 40 tokens."""
    return RunPrefill(
        request_id="r",
        placement_id=b"p" * 16,
        tenant_id="t",
        decode_worker_id="decode-1",
        model="timing",
        revision="r1",
        kv_format=it.decode.executor.kv_layout.key,
        cache_root=b"r" * 16,
        token_ids=bytes(4 * 40),
        block_hashes=b"",
        first_token=first_token,
        targets=it.decode.worker.kv_targets,
        lease_s=3,
        deadline_s=60,
        numerics=it.decode.executor.numerics,
    )


def test_prefill_failure_is_sent_to_the_decode_worker():
    async def main():
        async with cluster() as it:
            sent = []
            await it.decode.bus.subscribe(
                "hearth.v1.decode.decode-1.-.control", PrefillFailed, sent.append
            )
            command = run_prefill_of(it, first_token=0)
            await it.decode.bus.request(
                run_prefill("prefill-1"), command, PrefillAccepted, timeout_s=1
            )
            await it.settled()
            assert sent and sent[0].placement_id == b"p" * 16  # decode did not expect these frames

    run(main())


def test_prefill_with_a_failed_step_is_replaced():
    expected = outputs_of(request_of(PROMPT), candidates=())

    async def main():
        async with cluster() as it:
            broken = it.prefills[0].executor
            step, num_steps = broken.run, 0

            async def fail_from_second(inputs):
                nonlocal num_steps
                num_steps += 1
                if num_steps >= 2:
                    raise RuntimeError("out of memory")
                return await step(inputs)

            broken.run = fail_from_second
            received = await it.run(request_of(PROMPT), ("prefill-1", "prefill-2"))
            assert received.output == expected
            assert received.finish.served.prefill_worker_id == "prefill-2"
            await it.settled()

    run(main())


def test_failed_step_ends_only_its_own_sequences():
    async def main():
        async with cluster() as it:
            step = it.decode.executor.run

            async def broken(inputs):
                raise HearthError("out of memory")

            it.decode.executor.run = broken
            failed = await it.run(request_of(PROMPT[:10]), ())
            assert failed.finish.reason == "failed" and failed.finish.failure is not None
            it.decode.executor.run = step
            fine = await it.run(request_of(PROMPT[:10]), ())
            assert fine.finish.reason == "length"
            await it.settled()

    run(main())
