"""Requests for a model without workers wait for the first one, which an autoscaler starts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.scheduler.backlog import QueuedRequest
from services.scheduler.candidates import Candidates
from services.scheduler.waiting_for_host import NO_WORKER_GRACE_S
from shared import subjects
from shared.errors import Overloaded
from shared.messages import CancelQueued, Placed, PlacementFailed
from tests.services.scheduler.literals import submit_of
from tests.services.scheduler.rig import Rig, eventually
from tests.support.world.clock import run

COLD_START_S = 40.0


def scenario(test: Callable[[Rig], Awaitable[None]], **options: object) -> None:
    async def start() -> None:
        rig = Rig(**{"cold_start_s": COLD_START_S, **options})
        await rig.start()
        await test(rig)
        await rig.service.stop()

    run(start())


def wanted(rig: Rig) -> dict[str, int]:
    demands = rig.service._role_changes.load().demands
    return {each.role: each.num_wanted_workers for each in demands}


def test_request_is_served_by_the_first_worker() -> None:
    async def test(rig: Rig) -> None:
        await rig.submit(submit_of("r0"))
        await eventually(lambda: wanted(rig) == {"prefill": 1, "decode": 1}, within_s=2.0)
        await asyncio.sleep(COLD_START_S - 5.0)
        assert rig.results() == []
        await rig.worker("decode-0")
        placed = await rig.result(within_s=2.0)
        assert isinstance(placed, Placed)
        assert placed.worker_id == "decode-0"
        await eventually(lambda: wanted(rig) == {"prefill": 0, "decode": 0}, within_s=5.0)

    scenario(test)


def test_heartbeats_of_known_workers_do_not_retry_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 requests that none of 300 workers may serve took more than a core."""
    num_asked, has_any = 0, Candidates.has_any

    def counted(candidates: Candidates, ticket: QueuedRequest, now: float) -> bool:
        nonlocal num_asked
        num_asked += 1
        return has_any(candidates, ticket, now)

    async def test(rig: Rig) -> None:
        workers = tuple(f"decode-{number}" for number in range(10))
        for each in workers:
            await rig.worker(each)
        await rig.submit(submit_of("r0", excluded_workers=workers))
        await eventually(lambda: len(rig.service._unserved) == 1)
        monkeypatch.setattr(Candidates, "has_any", counted)
        await asyncio.sleep(1.0)
        assert num_asked <= 11  # one for each tick

    scenario(test)


def test_request_fails_if_no_worker_comes() -> None:
    async def test(rig: Rig) -> None:
        began_at = asyncio.get_running_loop().time()
        await rig.submit(submit_of("r0"))
        failed = await rig.result(within_s=COLD_START_S + 5.0)
        assert isinstance(failed, PlacementFailed)
        assert failed.failure.code == "no_capacity"
        assert failed.failure.retry_after_s
        assert "no worker serves 'm' now" in failed.failure.message
        waited_s = asyncio.get_running_loop().time() - began_at
        assert waited_s == pytest.approx(COLD_START_S, abs=1.0)
        await eventually(lambda: wanted(rig) == {}, within_s=2.0)

    scenario(test)


def test_client_that_leaves_is_forgotten() -> None:
    async def test(rig: Rig) -> None:
        await rig.submit(submit_of("r0"))
        await eventually(lambda: wanted(rig) != {}, within_s=2.0)
        cancel = CancelQueued(request_id="r0", gateway_id="gateway-0")
        await rig.buses["gateway-0"].publish(subjects.cancel("scheduler-0"), cancel)
        await eventually(lambda: wanted(rig) == {} and not len(rig.service._unserved), within_s=2.0)
        assert len(rig.service._queues) == 0

    scenario(test)


def test_waiting_requests_are_bounded() -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(Overloaded, match="this tenant's queue is full"):
            for number in range(18):
                await rig.submit(submit_of(f"r{number}"))
        assert len(rig.service._queues) == 16
        await rig.submit(submit_of("of another", tenant_id="other"))

    scenario(test, max_queued_requests=18)


def test_worker_that_does_not_reply_is_waited_for_as_before() -> None:
    """An autoscaler would start no other one for it."""

    async def test(rig: Rig) -> None:
        await rig.worker("decode-0")
        await rig.submit(submit_of("r0", excluded_workers=("decode-0",)))
        failed = await rig.result(within_s=NO_WORKER_GRACE_S + 1.0)
        assert isinstance(failed, PlacementFailed)

    scenario(test)


def test_without_cold_starts_an_idle_model_needs_a_worker() -> None:
    async def test(rig: Rig) -> None:
        await rig.submit(submit_of("r0"))
        failed = await rig.result(within_s=NO_WORKER_GRACE_S + 1.0)
        assert isinstance(failed, PlacementFailed)
        await rig.worker("decode-0")
        await eventually(lambda: wanted(rig) == {"prefill": 1, "decode": 1}, within_s=5.0)

    scenario(test, cold_start_s=0.0)
