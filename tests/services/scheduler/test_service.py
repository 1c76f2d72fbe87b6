from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from services.scheduler.service import MAX_PLACING
from shared import subjects
from shared.errors import (
    ContextFull,
    InvalidRequest,
    NoResponders,
    OutsideRegions,
    Overloaded,
    WorkerBusy,
)
from shared.lifecycle.health import SILENCE_LIMIT_S
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    CancelQueued,
    DecodeStarted,
    Placed,
    PlacementFailed,
    PrefixMatch,
    QueueKeepalive,
    StartDecode,
)
from tests.services.scheduler.literals import submit_of
from tests.services.scheduler.rig import Rig, eventually
from tests.support.world.clock import VirtualClock, run
from tests.support.world.randomness import SeededRandomness

NO_ROOM = 0


def scenario(test: Callable[[Rig], Awaitable[None]], **options: Any) -> None:
    async def play() -> None:
        rig = Rig(**options)
        await rig.start()
        await test(rig)
        await rig.service.stop()

    run(play())


def busy(message: StartDecode) -> DecodeStarted:
    raise WorkerBusy("full")


def now() -> float:
    return asyncio.get_running_loop().time()


def test_request_is_placed_and_forgotten() -> None:
    async def test(rig: Rig) -> None:
        decode = await rig.worker("decode-0")
        await rig.worker("prefill-0", "prefill")
        await rig.index()
        submit = submit_of("r0", num_prompt_tokens=2000)
        queued = await rig.submit(msgspec.structs.replace(submit, attempt=3))
        assert (queued.scheduler_id, queued.num_ahead) == ("scheduler-0", 0)
        placed = await rig.result()
        start = decode.started[0]
        assert placed == Placed(
            request_id="r0",
            placement_id=start.placement_id,
            worker_id="decode-0",
            queued_s=placed.queued_s,
            placement_s=placed.placement_s,
            scheduler_id="scheduler-0",
            attempt=3,
        )
        assert len(start.placement_id) == 16
        assert start.prefill_candidates == ("prefill-0",)
        assert 59.9 < start.request.deadline_s < 60.0
        await asyncio.sleep(2)
        assert rig.updates["gateway-0"] == [placed]  # no keepalive for a placed request

    scenario(test)


def test_heartbeats_report_the_queue() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", reply=busy)
        await rig.submit(submit_of("r0"))
        await asyncio.sleep(2)
        await rig.submit(submit_of("r1"))
        load = rig.service.health_monitor.describe().scheduler
        assert load is not None
        assert load.num_queued_requests == 2
        assert 2.0 <= load.oldest_wait_s < 2.1
        rig.service._queues.remove("r0")
        load = rig.service.health_monitor.describe().scheduler
        assert load is not None and load.oldest_wait_s < 0.1

    scenario(test)


def test_busy_worker_is_followed_by_next_with_a_new_id() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", reply=busy)
        await rig.worker("decode-1", reply=busy)
        good = await rig.worker("decode-2")
        for number in range(6):
            await rig.submit(submit_of(f"r{number}"))
        await rig.result(num=6)
        assert {each.worker_id for each in rig.results() if isinstance(each, Placed)} == {
            "decode-2"
        }
        ids = [start.placement_id for worker in rig.workers.values() for start in worker.started]
        assert len(ids) == len(set(ids)) > 6
        assert len(good.started) == 6

    scenario(test)


def test_start_timeout_aborts_and_tries_the_next_worker() -> None:
    async def test(rig: Rig) -> None:
        hung = await rig.worker("decode-0")
        await rig.submit(submit_of("before"))  # its round trip is known by then
        await rig.result()
        hung.started.clear()
        hung.delay_s = 5.0
        await rig.submit(submit_of("r0"))
        await eventually(lambda: len(hung.started) == 1)
        began = now()
        good = await rig.worker("decode-1")
        placed = await rig.result(num=2)
        assert isinstance(placed, Placed)
        assert placed.worker_id == "decode-1"
        assert now() - began < 0.11
        await eventually(lambda: len(hung.aborted) == 1)
        assert hung.aborted[0].placement_id == hung.started[0].placement_id
        assert hung.aborted[0].placement_id != good.started[0].placement_id

    scenario(test)


def test_late_reply_to_a_start_places_a_request_that_waits() -> None:
    async def test(rig: Rig) -> None:
        slow = await rig.worker("decode-0", delay_s=1.0)  # longer than a first reply is waited for
        await rig.submit(submit_of("r0"))
        placed = await rig.result()
        assert isinstance(placed, Placed)
        assert placed.placement_id == slow.started[0].placement_id
        await asyncio.sleep(4.0)  # later tries are aborted, by their late replies
        assert len(rig.results()) == 1
        assert {each.placement_id for each in slow.aborted} == {
            each.placement_id for each in slow.started[1:]
        }
        assert not len(rig.service._queues)

    scenario(test)


def test_first_of_two_workers_to_reply_has_the_request() -> None:
    async def test(rig: Rig) -> None:
        late = await rig.worker("decode-0", delay_s=0.9)
        await rig.submit(submit_of("r0"))
        await eventually(lambda: len(late.started) == 1)
        other = await rig.worker("decode-1", delay_s=0.5)
        placed = await rig.result()
        assert isinstance(placed, Placed)
        assert placed.placement_id == late.started[0].placement_id
        await eventually(lambda: len(other.aborted) == 1)
        assert other.aborted[0].placement_id == other.started[0].placement_id

    scenario(test)


def test_rejection_that_comes_late_is_no_silence() -> None:
    async def test(rig: Rig) -> None:
        full = await rig.worker("decode-0", delay_s=1.0, reply=busy)
        await rig.submit(submit_of("r0", deadline_s=8.0))
        failed = await rig.result()
        assert isinstance(failed, PlacementFailed)
        assert failed.failure.code == "deadline_exceeded"  # like every request without room
        assert len(full.started) > 5
        assert full.aborted == []

    scenario(test)


def test_worker_without_replies_is_closed_and_tried_again_later() -> None:
    async def test(rig: Rig) -> None:
        silent = await rig.worker("decode-0", delay_s=600.0)
        for number in range(5):
            await rig.submit(submit_of(f"r{number}"))
            failed = await rig.result(num=number + 1)
            assert isinstance(failed, PlacementFailed)
            assert failed.failure.code == "no_capacity"
        gaps = [after - before for before, after in pairwise(silent.started_at)]
        assert max(gaps[:2]) < 1.0  # three starts, then it is closed
        assert [gap for gap in gaps if gap > 1.0] == pytest.approx([3.0, 5.6], abs=0.8)
        silent.delay_s = 0.0
        await asyncio.sleep(10.0)
        await rig.submit(submit_of("r5"))
        assert isinstance(await rig.result(num=6), Placed)

    scenario(test)


def test_lost_worker_that_left_starts_unanswered_is_forgotten() -> None:
    """Its last start may fail after its loss."""

    async def test(rig: Rig) -> None:
        await rig.worker("decode-0")
        rig.network.freeze("decode-0")
        await asyncio.sleep(0.7 * SILENCE_LIMIT_S)
        await rig.submit(submit_of("r0"))
        await rig.result()
        assert not rig.service.health_monitor.fleet.is_live("decode-0")
        assert rig.service._starts._silent_workers.silent() == set()

    scenario(test)


def test_disconnected_worker_is_skipped() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0")
        rig.network.disconnect("decode-0")
        await rig.worker("decode-1")
        rig.workers["decode-1"].num_free_blocks = 900
        for number in range(4):
            await rig.submit(submit_of(f"r{number}"))
        await rig.result(num=4)
        assert len(rig.workers["decode-1"].started) == 4

    scenario(test)


def test_unresponsive_index_delays_placement_by_20_ms() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0")
        await rig.index()
        rig.network.freeze("kv_index-0")
        began = now()
        await rig.submit(submit_of("r0", num_prompt_tokens=100))
        await rig.result()
        assert 0.02 <= now() - began < 0.03

    scenario(test)


def test_requests_are_placed_where_their_prefix_is_cached() -> None:
    async def test(rig: Rig) -> None:
        for number in range(3):
            await rig.worker(f"decode-{number}")
        await rig.index()
        rig.matches = (PrefixMatch(worker_id="decode-1", num_blocks=62),)
        for number in range(5):
            await rig.submit(submit_of(f"r{number}", num_prompt_tokens=1000))
        await rig.result(num=5)
        assert len(rig.workers["decode-1"].started) == 5

    scenario(test)


def test_burst_between_heartbeats_spreads_over_workers() -> None:
    async def test(rig: Rig) -> None:
        for number in range(4):
            await rig.worker(f"decode-{number}")
        began = now()
        for number in range(40):
            await rig.submit(submit_of(f"r{number}", num_prompt_tokens=500))
        await rig.result(num=40)
        assert now() - began < 0.25
        counts = Counter(e.worker_id for e in rig.results() if isinstance(e, Placed))
        assert sorted(counts.values()) == [10, 10, 10, 10]

    scenario(test)


def test_fair_queue_orders_concurrent_requests() -> None:
    """As after the loss of another scheduler: all its requests arrive in one read."""

    async def test(rig: Rig) -> None:
        decode = await rig.worker("decode-0")
        for number in range(40):
            rig.service._submit(submit_of(f"flood-{number}", tenant_id="flooder"))
        rig.service._submit(submit_of("other"))
        rig.service._submit(submit_of("urgent", tenant_id="flooder", priority=3))
        await rig.result(num=42)
        order = [start.request.request_id for start in decode.started]
        assert order[0] == "flood-0"  # the only request at that time
        assert {"urgent", "other"} < set(order[:8])

    scenario(test)


def test_burst_does_not_exceed_free_blocks_of_the_heartbeat() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("decode-0", num_free_blocks=100)
        for number in range(10):  # of 32 blocks each
            await rig.submit(submit_of(f"r{number}", num_prompt_tokens=500))
        await asyncio.sleep(0.01)
        assert len(worker.started) == 3

    scenario(test)


def test_invalid_request_fails_at_once() -> None:
    def reject(message: StartDecode) -> DecodeStarted:
        raise InvalidRequest("no such token", param="prompt")

    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", reply=reject)
        await rig.worker("decode-1", reply=reject)
        await rig.submit(submit_of("r0"))
        failed = await rig.result(within_s=0.05)
        assert isinstance(failed, PlacementFailed)
        assert (failed.failure.code, failed.failure.param) == ("invalid_request", "prompt")
        assert sum(len(worker.started) for worker in rig.workers.values()) == 1

    scenario(test)


def test_request_longer_than_every_context_fails_at_once() -> None:
    """Once the scheduler knows all live workers: a larger one may be starting, too."""

    async def test(rig: Rig) -> None:
        await rig.worker("decode-0")  # 1,000 blocks
        await asyncio.sleep(1.5)
        for number, (num_prompt_tokens, max_tokens) in enumerate(((16_001, 1), (20, 15_982))):
            message = submit_of(
                f"r{number}", num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens
            )
            await rig.submit(message)
            failed = await rig.result(num=number + 1, within_s=0.1)
            assert isinstance(failed, PlacementFailed)
            assert failed.failure.code == "no_capacity"
            assert "no live worker's context holds 16001 tokens" in failed.failure.message
        await rig.submit(submit_of("r2", num_prompt_tokens=20, max_tokens=15_981))
        assert isinstance(await rig.result(num=3, within_s=0.1), Placed)

    scenario(test)


def test_scheduler_that_has_just_started_waits_for_a_larger_context() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", max_context_tokens=128)
        await rig.submit(submit_of("r0", num_prompt_tokens=40, max_tokens=200))
        await asyncio.sleep(0.5)
        await rig.worker("decode-1", max_context_tokens=4096)
        placed = await rig.result(within_s=0.5)
        assert isinstance(placed, Placed) and placed.worker_id == "decode-1"
        await rig.submit(submit_of("r1", num_prompt_tokens=40, max_tokens=5000))
        failed = await rig.result(num=2, within_s=3.0)
        assert isinstance(failed, PlacementFailed) and failed.failure.code == "no_capacity"

    scenario(test)


def test_requests_that_wait_for_a_large_worker_block_no_others() -> None:
    async def test(rig: Rig) -> None:
        small = await rig.worker("decode-0", max_context_tokens=128)
        large = await rig.worker("decode-1", num_free_blocks=NO_ROOM)
        await rig.submit(submit_of("long", num_prompt_tokens=40, max_tokens=200))
        await rig.submit(submit_of("short", num_prompt_tokens=40, max_tokens=20))
        placed = await rig.result(within_s=0.05)
        assert isinstance(placed, Placed)
        assert (placed.request_id, placed.worker_id) == ("short", "decode-0")
        large.num_free_blocks = 100
        placed = await rig.result(num=2, within_s=0.5)
        assert isinstance(placed, Placed)
        assert (placed.request_id, placed.worker_id) == ("long", "decode-1")
        assert len(small.started) == 1

    scenario(test)


def test_unfit_worker_is_excluded_for_this_request_alone() -> None:
    async def test(rig: Rig) -> None:
        def unfit_for_r0(message: StartDecode) -> DecodeStarted:
            if message.request.request_id == "r0":
                raise ContextFull("this worker's KV cache is smaller")
            return DecodeStarted(placement_id=message.placement_id, num_cached_tokens=0)

        small = await rig.worker("decode-0", reply=unfit_for_r0)
        await rig.submit(submit_of("r0"))
        await asyncio.sleep(1.0)  # it does not take turns with the worker's heartbeats
        assert len(small.started) == 1
        await rig.worker("decode-1")
        placed = await rig.result(within_s=0.5)
        assert isinstance(placed, Placed) and placed.worker_id == "decode-1"
        for number in range(1, 9):
            await rig.submit(submit_of(f"r{number}"))
        await rig.result(num=9)
        assert len(small.started) > 1

    scenario(test)


def test_queued_requests_start_when_a_heartbeat_shows_room() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("decode-0", num_free_blocks=NO_ROOM)
        await rig.submit(submit_of("r0"))
        await rig.submit(submit_of("r1"))
        await asyncio.sleep(3)
        assert worker.started == []
        worker.num_free_blocks = 100
        await rig.result(num=2, within_s=0.3)
        assert [start.request.request_id for start in worker.started] == ["r0", "r1"]
        assert worker.started[0].request.deadline_s < 57

    scenario(test)


def test_busy_workers_are_retried_after_their_next_heartbeat() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("decode-0", reply=busy)
        await rig.submit(submit_of("r0"))
        await asyncio.sleep(1.0)
        assert 3 <= len(worker.started) <= 6
        worker.reply = type(worker).reply
        assert isinstance(await rig.result(within_s=0.3), Placed)

    scenario(test)


def test_full_model_does_not_delay_another() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", num_free_blocks=NO_ROOM)
        await rig.worker("decode-1", model="other")
        await rig.submit(submit_of("r0"))
        await rig.submit(submit_of("r1", model="other"))
        placed = await rig.result(within_s=0.1)
        assert (placed.request_id, type(placed)) == ("r1", Placed)

    scenario(test)


def test_blocked_queue_is_forgotten_when_no_request_waits_in_it() -> None:
    """Queues differ in regions and contexts: requests that gave up must not leave one each."""

    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", num_free_blocks=NO_ROOM, region="eu")
        for number in range(5):
            regions = ("eu", f"other-{number}")
            await rig.submit(submit_of(f"r{number}", allowed_regions=regions, deadline_s=0.5))
        await eventually(lambda: len(rig.service._blocked.all()) == 5)
        await rig.result(num=5)
        await eventually(lambda: not rig.service._blocked.all(), within_s=0.5)

    scenario(test, region="eu")


def test_next_request_is_placed_when_enough_work_is_done() -> None:
    """The request waits neither for the next tick nor for the next heartbeat."""

    async def test(rig: Rig) -> None:
        worker = await rig.worker("decode-0", token_s=1e-4)
        for number in range(12):
            await asyncio.sleep(0.57)  # each time in another phase of ticks and heartbeats
            first = len(worker.started_at)
            await rig.submit(submit_of(f"a{number}", num_prompt_tokens=1100))
            await rig.submit(submit_of(f"b{number}", num_prompt_tokens=100))
            await eventually(lambda first=first: len(worker.started_at) == first + 2)
            assert worker.started_at[-1] - worker.started_at[-2] < 0.03

    scenario(test)


def test_keepalives_list_queued_requests() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", num_free_blocks=NO_ROOM)
        await rig.gateway("gateway-1")
        await rig.submit(submit_of("r0"))
        await rig.submit(submit_of("r1"))
        await rig.submit(submit_of("r2", gateway_id="gateway-1"))
        await asyncio.sleep(1.6)
        keepalive = QueueKeepalive(scheduler_id="scheduler-0", request_ids=("r0", "r1"))
        other = QueueKeepalive(scheduler_id="scheduler-0", request_ids=("r2",))
        assert rig.updates["gateway-0"] == [keepalive] * 3
        assert rig.updates["gateway-1"] == [other] * 3

    scenario(test)


def test_deadline_ends_the_wait() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", num_free_blocks=NO_ROOM)
        began = now()
        await rig.submit(submit_of("r0", deadline_s=2.0))
        failed = await rig.result()
        assert isinstance(failed, PlacementFailed)
        assert failed.failure.code == "deadline_exceeded"
        assert 2.0 <= now() - began < 2.2
        rig.workers["decode-0"].num_free_blocks = 100
        await asyncio.sleep(1)
        assert rig.results() == [failed]

    scenario(test)


def test_deadline_during_start_decode_fails_request_once() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("decode-0", delay_s=0.09)
        for number in range(20):  # at every phase of the scheduler's tick
            await rig.submit(submit_of(f"r{number}", deadline_s=0.08))
            await asyncio.sleep(0.013)
        await asyncio.sleep(2)
        assert [each.request_id for each in rig.results()] != []
        assert len({each.request_id for each in rig.results()}) == len(rig.results()) == 20
        failed = {each.request_id for each in rig.results() if isinstance(each, PlacementFailed)}
        started = {each.placement_id: each.request.request_id for each in worker.started}
        assert failed
        assert {started[each.placement_id] for each in worker.aborted} == failed

    scenario(test)


def test_deadline_before_start_decode_leaves_load_unchanged() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", num_free_blocks=10)
        await rig.index()
        for number in range(3):
            await rig.submit(submit_of(f"r{number}", num_prompt_tokens=100, deadline_s=0.0001))
            result = await rig.result(num=number + 1)
            assert isinstance(result, PlacementFailed)
            assert result.failure.code == "deadline_exceeded"
        await rig.submit(submit_of("r3", num_prompt_tokens=100))
        assert isinstance(await rig.result(num=4, within_s=2.0), Placed)

    scenario(test)


def test_request_without_a_worker_fails_after_the_grace() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", model="other")
        began = now()
        await rig.submit(submit_of("r0"))
        failed = await rig.result()
        assert isinstance(failed, PlacementFailed)
        assert failed.failure.code == "no_capacity"
        assert failed.failure.retry_after_s is not None
        assert 2.0 <= now() - began < 2.3

    scenario(test)


def test_worker_that_joins_within_the_grace_gets_the_request() -> None:
    async def test(rig: Rig) -> None:
        await rig.submit(submit_of("r0"))
        await asyncio.sleep(1.0)
        await rig.worker("decode-0")
        assert isinstance(await rig.result(within_s=0.5), Placed)

    scenario(test)


def test_excluded_workers_are_not_used() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0")
        await rig.worker("decode-1")
        for number in range(8):
            await rig.submit(submit_of(f"r{number}", excluded_workers=("decode-0",)))
        await rig.result(num=8)
        assert len(rig.workers["decode-1"].started) == 8
        await rig.submit(submit_of("r8", excluded_workers=("decode-0", "decode-1")))
        await rig.submit(submit_of("r9"))
        assert (await rig.result(num=9, within_s=0.1)).request_id == "r9"
        failed = await rig.result(num=10)
        assert isinstance(failed, PlacementFailed)
        assert failed.failure.code == "no_capacity"

    scenario(test)


def test_request_runs_in_its_allowed_regions_or_fails() -> None:
    async def test(rig: Rig) -> None:
        eu = await rig.worker("decode-0", region="eu", num_free_blocks=NO_ROOM)
        us = await rig.worker("decode-1", region="us")
        await rig.worker("decode-2")
        await rig.submit(submit_of("r0", allowed_regions=("eu", "hub")))
        await rig.submit(submit_of("r1", allowed_regions=("asia", "hub")))
        with pytest.raises(OutsideRegions, match="scheduler: the region 'hub'"):
            await rig.submit(submit_of("r2", allowed_regions=("eu",)))
        failed = await rig.result()
        assert isinstance(failed, PlacementFailed)
        assert failed.failure.code == "no_capacity"
        assert "in the allowed regions (asia, hub)" in failed.failure.message
        eu.num_free_blocks = 100
        placed = await rig.result(num=2, within_s=0.3)
        assert isinstance(placed, Placed)
        assert placed.worker_id == "decode-0"
        assert us.started == rig.workers["decode-2"].started == []

    scenario(test, region="hub")


@pytest.mark.parametrize("phase", ["queued", "parked", "matching", "starting"])
def test_cancel_ends_a_request_in_each_phase(phase: str) -> None:
    async def test(rig: Rig) -> None:
        if phase != "parked":
            room = NO_ROOM if phase == "queued" else 100
            await rig.worker("decode-0", num_free_blocks=room, delay_s=0.05)
        if phase == "matching":
            await rig.index()
            rig.network.freeze("kv_index-0")
        await rig.submit(submit_of("r0"))
        cancel = CancelQueued(request_id="r0", gateway_id="gateway-0", attempt=0)
        await asyncio.sleep(
            {"queued": 1.0, "parked": 1.0, "matching": 0.005, "starting": 0.03}[phase]
        )
        await rig.buses["gateway-0"].publish(subjects.cancel("scheduler-0"), cancel)
        await asyncio.sleep(5)
        assert rig.results() == []
        if phase == "starting":
            worker = rig.workers["decode-0"]
            assert [each.placement_id for each in worker.aborted] == [
                each.placement_id for each in worker.started
            ]
            assert len(worker.aborted) == 1
        elif phase != "parked":
            assert rig.workers["decode-0"].started == []

    scenario(test)


def test_requests_of_a_lost_gateway_are_dropped() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("decode-0", num_free_blocks=NO_ROOM)
        bus = await rig.gateway("gateway-1")
        health_monitor = HealthMonitor(bus, VirtualClock(), SeededRandomness(9), roles=("gateway",))
        await health_monitor.start()
        await health_monitor.transition_to("ready")
        await asyncio.sleep(1.5)
        await rig.submit(submit_of("r0", gateway_id="gateway-1"))
        await rig.submit(submit_of("r1"))
        rig.network.disconnect("gateway-1")
        rig.network.freeze("gateway-1")
        await asyncio.sleep(SILENCE_LIMIT_S + 0.5)
        worker.num_free_blocks = 100
        await rig.result()
        await asyncio.sleep(1)
        assert [start.request.request_id for start in worker.started] == ["r1"]

    scenario(test)


def test_full_queue_rejects_with_retry_after() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", num_free_blocks=NO_ROOM)
        await rig.submit(submit_of("r0"))
        await rig.submit(submit_of("r1"))
        with pytest.raises(Overloaded) as raised:
            await rig.submit(submit_of("r2"))
        assert raised.value.retry_after_s is not None

    scenario(test, max_queued_requests=2)


def test_tenants_take_turns_when_room_is_scarce() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("decode-0", num_free_blocks=NO_ROOM)
        for number in range(4):
            await rig.submit(submit_of(f"a{number}", tenant_id="a", num_prompt_tokens=20))
        await rig.submit(submit_of("b0", tenant_id="b"))
        await asyncio.sleep(1)
        worker.num_free_blocks = 1000
        await rig.result(num=5)
        order = [start.request.request_id for start in worker.started]
        assert order.index("b0") == 1

    scenario(test)


def test_drain_places_or_fails_all_queued_requests() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("decode-0", num_free_blocks=NO_ROOM)
        await rig.worker("decode-1", model="full", num_free_blocks=NO_ROOM)
        await rig.submit(submit_of("r0"))
        await rig.submit(submit_of("r1", model="full"), subjects.submit_to("scheduler-0"))
        draining = asyncio.create_task(rig.service.drain())
        await asyncio.sleep(0.5)
        for subject in (subjects.SUBMIT, subjects.submit_to("scheduler-0")):
            with pytest.raises(NoResponders):
                await rig.submit(submit_of("r2"), subject)
        worker.num_free_blocks = 100
        await draining
        await rig.result(num=2)
        results = {each.request_id: type(each) for each in rig.results()}
        assert results == {"r0": Placed, "r1": PlacementFailed}

    scenario(test)


def test_each_request_gets_exactly_one_result() -> None:
    """Places 100 requests on workers that reject some, over a network that loses some."""

    async def test(rig: Rig) -> None:
        randomness = SeededRandomness(3)

        def flaky(message: StartDecode) -> DecodeStarted:
            if randomness.below(3) == 0:
                raise WorkerBusy("not now")
            return DecodeStarted(placement_id=message.placement_id, num_cached_tokens=0)

        for number in range(3):
            await rig.worker(f"decode-{number}", reply=flaky)
        rig.network.is_dropped = lambda subject, sender, receiver: (
            subject.endswith(".start") and randomness.below(10) == 0
        )
        for number in range(100):
            await rig.submit(submit_of(f"r{number}", deadline_s=20.0))
        await rig.result(num=100)
        await asyncio.sleep(5)
        names = [each.request_id for each in rig.results()]
        assert sorted(names) == sorted(f"r{number}" for number in range(100))
        assert all(isinstance(each, Placed) for each in rig.results())

    scenario(test)


def failures(rig: Rig) -> list[tuple[str, str]]:
    found = [each for each in rig.results() if isinstance(each, PlacementFailed)]
    return [(each.request_id, each.failure.code) for each in found]


def test_request_that_must_not_wait_is_placed_where_there_is_room() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("decode-0")
        await rig.submit(submit_of("r0", is_queueable=False))
        assert isinstance(await rig.result(within_s=0.1), Placed)
        assert [each.is_queueable for each in worker.started] == [False], "as for another site"

    scenario(test)


@pytest.mark.parametrize("has_room", [False, True])
def test_request_that_must_not_wait_is_rejected_at_once(has_room: bool) -> None:
    async def test(rig: Rig) -> None:
        if has_room:
            await rig.worker("decode-0", reply=busy)
        else:
            await rig.worker("decode-0", num_free_blocks=NO_ROOM)
        await rig.submit(submit_of("r0", is_queueable=False))
        failed = await rig.result(within_s=0.1)
        assert isinstance(failed, PlacementFailed)
        assert (failed.request_id, failed.failure.code) == ("r0", "overloaded")
        assert failed.failure.retry_after_s  # 0 would be retried at once
        await rig.submit(submit_of("r1"))  # one that may wait does
        await asyncio.sleep(0.3)
        assert failures(rig) == [("r0", "overloaded")]
        assert rig.service._queues.remove("r1") is not None

    scenario(test)


def test_rejected_request_that_must_not_wait_blocks_no_others() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", num_free_blocks=2)
        await rig.submit(submit_of("long", num_prompt_tokens=100, is_queueable=False))
        await eventually(lambda: failures(rig) == [("long", "overloaded")], within_s=0.05)
        await rig.submit(submit_of("short", num_prompt_tokens=5, is_queueable=False))
        placed = await rig.result(num=2, within_s=0.02)
        assert isinstance(placed, Placed) and placed.request_id == "short"

    scenario(test)


def test_request_that_must_not_wait_is_rejected_where_others_wait() -> None:
    """Its size fits no better than that of the requests before it: it never overtakes them."""

    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", num_free_blocks=2)
        await rig.submit(submit_of("long", num_prompt_tokens=100))
        await eventually(lambda: len(rig.service._blocked.all()) == 1)
        with pytest.raises(Overloaded):
            await rig.submit(submit_of("short", num_prompt_tokens=5, is_queueable=False))
        assert [each.request.request_id for each in rig.service._queues.held()] == ["long"]

    scenario(test)


def test_request_that_must_not_wait_is_rejected_once_its_queue_is_blocked() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", num_free_blocks=NO_ROOM)
        submits = [submit_of(f"r{number}") for number in range(MAX_PLACING)]
        last = submit_of("last", is_queueable=False)  # waits for a turn to be placed
        await asyncio.gather(*(rig.submit(each) for each in (*submits, last)))
        await eventually(lambda: failures(rig) == [("last", "overloaded")], within_s=0.1)

    scenario(test)


def test_request_that_must_not_wait_is_rejected_without_a_worker() -> None:
    async def test(rig: Rig) -> None:
        await rig.submit(submit_of("r0", is_queueable=False))
        await eventually(lambda: failures(rig) == [("r0", "no_capacity")], within_s=0.1)

    scenario(test)
