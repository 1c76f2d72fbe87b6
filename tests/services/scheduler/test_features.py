"""Requests that need features of their workers, in fleets where only some workers have them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from services.scheduler.backlog import QueueKey
from services.scheduler.blocked_queues import BlockedQueues
from services.scheduler.candidates import _unserved
from services.scheduler.placement import LocalPrefill, RequestSize
from services.scheduler.waiting_for_host import NO_WORKER_GRACE_S
from services.scheduler.worker_table import MAX_MASKS, WorkerRow, WorkerTable
from shared.errors import WorkerUnfit
from shared.messages import DecodeStarted, Placed, PlacementFailed, StartDecode
from tests.services.scheduler.literals import submit_of
from tests.services.scheduler.rig import NUMERICS, Rig, eventually
from tests.services.scheduler.test_fleet import CARD
from tests.services.scheduler.test_fleet import Rig as FleetRig
from tests.services.scheduler.test_numerics import OTHER, placed_on
from tests.services.scheduler.test_placement import D1, D2, D3, LONG, P1, P2, placed
from tests.services.scheduler.test_service import NO_ROOM, now, scenario

GRAMMAR = ("grammar/1",)
BOTH = ("grammar/1", "images/2")


def having(worker: WorkerRow, *features: str) -> WorkerRow:
    return replace(worker, features=frozenset(features))


def needing(*features: str, affinity_key: str = "") -> RequestSize:
    return replace(LONG, features=features, affinity_key=affinity_key)


# ── placement ────────────────────────────────────────────────────────────────────────────────────


def test_only_workers_with_all_needed_features_decode() -> None:
    """Also when another one is idle, holds the prefix or is the affinity key's."""
    decodes = [D1, having(D2, "grammar/1"), having(D3, *BOTH, "more/1")]
    loaded = [*decodes[:2], replace(decodes[2], decode_tokens=50_000)]
    for key in ("", "a", "b", "c"):
        needs = needing(*BOTH, affinity_key=key)
        assert placed(needs, loaded, [], {"d1": 99, "d2": 99}).decode_id == "d3"
        assert placed(needs, loaded[:2], [], {"d1": 99}) is None
        assert placed(needing("grammar/1", affinity_key=key), loaded[:2], []).decode_id == "d2"


def test_features_are_compared_as_plain_strings() -> None:
    for name in ("grammar/10", "grammar", "Grammar/1", "grammar/1 ", ""):
        assert placed(needing("grammar/1"), [having(D1, name)], []) is None
        assert placed(needing(name), [having(D1, name)], []) is not None


def test_prefill_workers_without_a_needed_feature_are_no_candidates() -> None:
    decode, capable = having(D1, "grammar/1"), having(P2, "grammar/1")
    needs = needing("grammar/1")
    at_once = LocalPrefill(always=4, at_most=4)
    for prefills, expected in (([P1, capable], ("p2",)), ([P1], ()), ([capable], ("p2",))):
        target = placed(needs, [decode], prefills, {"p1": 99}, local_prefill=at_once)
        assert target.prefill_candidates == expected
        assert not target.has_unlike_prefill
    assert set(placed(LONG, [decode], [P1, capable]).prefill_candidates) == {"p1", "p2"}


def test_features_and_regions_limit_together() -> None:
    needs = replace(needing("grammar/1"), allowed_regions=("eu",))
    d_eu, d_us = replace(D1, region="eu"), having(replace(D2, region="us"), "grammar/1")
    assert placed(needs, [d_eu, d_us], []) is None
    assert placed(needs, [having(d_eu, "grammar/1"), d_us], []).decode_id == "d1"


def test_table_follows_changes_of_features_and_rows() -> None:
    table = WorkerTable([D1, having(D2, "grammar/1"), D3])

    def capable() -> list[str]:
        mask = table.allowed((), GRAMMAR)
        return sorted(name for name, has in zip(table.ids, mask, strict=True) if has)

    assert capable() == ["d2"]
    table.put(having(D1, "grammar/1"))
    assert capable() == ["d1", "d2"]
    table.remove("d1")  # the last row takes its place
    assert capable() == ["d2"]
    table.put(having(replace(D1, worker_id="d4"), "grammar/1"))
    assert capable() == ["d2", "d4"]
    table.put(D2)
    assert capable() == ["d4"]


def test_table_follows_a_worker_to_another_region() -> None:
    table = WorkerTable([replace(D1, region="eu"), replace(D2, region="us")])
    assert list(table.allowed(("eu",), ())) == [True, False]
    table.put(replace(D2, region="eu"))
    assert list(table.allowed(("eu",), ())) == [True, True]
    table.put(replace(D1, region=""))
    assert list(table.allowed(("eu",), ())) == [False, True]


def test_masks_of_ever_new_needs_take_bounded_memory() -> None:
    table = WorkerTable([having(D1, "n7")])
    found = [table.has_any((), but=(), features=(f"n{number}",)) for number in range(500)]
    assert found.index(True) == 7 and sum(found) == 1
    assert len(table._masks) <= MAX_MASKS


def test_blocked_queue_is_probed_for_room_on_capable_workers_only() -> None:
    blocked = BlockedQueues()
    queue = QueueKey("m", "r1", 16, needs=GRAMMAR)
    blocked.block(queue, needing("grammar/1"))
    beats = FleetRig()
    for role in ("decode", "prefill"):
        blocked.on_heartbeat(beats.beat("w1", 0.0, role))
        assert blocked.closed() == {queue}
        capable = msgspec.structs.replace(CARD, features=BOTH)
        blocked.on_heartbeat(beats.beat("w2", 0.0, role, model=capable))
        assert blocked.closed() == set()
        blocked.take(queue)


# ── the service ──────────────────────────────────────────────────────────────────────────────────


def test_request_goes_to_the_worker_that_has_what_it_needs() -> None:
    async def test(rig: Rig) -> None:
        old = await rig.worker("decode-0")
        new = await rig.worker("decode-1", features=BOTH)
        await rig.worker("prefill-0", "prefill")
        await rig.worker("prefill-1", "prefill", features=GRAMMAR)
        for number in range(8):
            await rig.submit(submit_of(f"r{number}", num_prompt_tokens=2000, needs=GRAMMAR))
            placed = await rig.result(num=number + 1)
            assert isinstance(placed, Placed) and placed.worker_id == "decode-1"
            assert placed.needs == GRAMMAR
        assert old.started == []
        candidates = {each for start in new.started for each in start.prefill_candidates}
        assert candidates == {"prefill-1"}
        assert {start.request.needs for start in new.started} == {GRAMMAR}
        await rig.submit(submit_of("plain", excluded_workers=("decode-1",)))
        assert await placed_on(rig, num=9) == "decode-0"

    scenario(test)


@pytest.mark.parametrize("features", [(), ("grammar/2",)])
def test_request_fails_if_no_live_worker_has_what_it_needs(features: tuple[str, ...]) -> None:
    async def test(rig: Rig) -> None:
        old = await rig.worker("decode-0", features=features)
        await rig.worker("prefill-0", "prefill", features=BOTH)
        began = now()
        await rig.submit(submit_of("r0", needs=BOTH))
        await rig.submit(submit_of("plain"))
        assert await placed_on(rig, num=1) == "decode-0"
        failed = await rig.result(num=2)
        assert isinstance(failed, PlacementFailed)
        assert failed.failure.code == "no_capable_worker"
        assert failed.failure.message == "no live worker of 'm' has grammar/1, images/2"
        assert failed.failure.retry_after_s is not None
        assert NO_WORKER_GRACE_S <= now() - began < NO_WORKER_GRACE_S + 0.2
        assert [each.request.request_id for each in old.started] == ["plain"]

    scenario(test)


def test_request_waits_for_a_worker_that_joins_within_the_grace() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0")
        await rig.submit(submit_of("r0", needs=GRAMMAR))
        await rig.worker("decode-1", features=GRAMMAR)
        assert await placed_on(rig, num=1) == "decode-1"

    scenario(test)


def test_request_waits_for_room_on_a_capable_worker_and_delays_no_other() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0")
        full = await rig.worker("decode-1", num_free_blocks=NO_ROOM, features=GRAMMAR)
        began = now()
        await rig.submit(submit_of("constrained", needs=GRAMMAR))
        await rig.submit(submit_of("plain"))
        assert await placed_on(rig, num=1) == "decode-0"
        await asyncio.sleep(3 * NO_WORKER_GRACE_S)
        full.num_free_blocks = 100
        assert await placed_on(rig, num=2) == "decode-1"
        assert now() - began > 3 * NO_WORKER_GRACE_S, "busy is not incapable"

    scenario(test)


def test_queued_requests_fail_once_the_last_capable_worker_has_left() -> None:
    """All together, while another worker is idle."""

    async def test(rig: Rig) -> None:
        old = await rig.worker("decode-0")
        full = await rig.worker("decode-1", num_free_blocks=NO_ROOM, features=GRAMMAR)
        for number in range(10):
            await rig.submit(submit_of(f"r{number}", needs=GRAMMAR))
        await asyncio.sleep(1.0)
        left_at = now()
        await full.health_monitor.stop()
        await rig.result(num=10)
        failed = [each for each in rig.results() if isinstance(each, PlacementFailed)]
        assert [each.failure.code for each in failed] == ["no_capable_worker"] * 10
        assert now() - left_at < NO_WORKER_GRACE_S + 0.3
        assert old.started == []

    scenario(test)


def test_request_is_placed_when_enough_work_is_done_on_a_capable_worker() -> None:
    """Without waiting for the next tick or heartbeat, although another worker is open."""

    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", token_s=1e-4)
        worker = await rig.worker("decode-1", token_s=1e-4, features=GRAMMAR)
        for number in range(12):
            await asyncio.sleep(0.57)  # each time in another phase of ticks and heartbeats
            first = len(worker.started_at)
            await rig.submit(submit_of(f"a{number}", num_prompt_tokens=1100, needs=GRAMMAR))
            await rig.submit(submit_of(f"b{number}", num_prompt_tokens=100, needs=GRAMMAR))
            await eventually(lambda first=first: len(worker.started_at) == first + 2)
            assert worker.started_at[-1] - worker.started_at[-2] < 0.02

    scenario(test)


def test_live_capable_worker_that_is_excluded_is_not_called_missing() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0")
        await rig.worker("decode-1", features=GRAMMAR)
        submit = submit_of("r0", needs=GRAMMAR, excluded_workers=("decode-1",))
        await rig.submit(submit)
        failed = await rig.result()
        assert isinstance(failed, PlacementFailed)
        assert failed.failure.code == "no_capacity"

    scenario(test)


def test_context_is_that_of_capable_workers() -> None:
    """The large context of another worker is no hope, and a short one says so at once."""

    async def test(rig: Rig) -> None:
        await rig.worker("decode-0")
        await rig.worker("decode-1", max_context_tokens=25, features=GRAMMAR)
        await asyncio.sleep(2.0)  # the scheduler knows all live workers by then
        began = now()
        await rig.submit(submit_of("r0", num_prompt_tokens=20, max_tokens=10, needs=GRAMMAR))
        failed = await rig.result()
        assert isinstance(failed, PlacementFailed)
        assert failed.failure.message == "no live worker's context holds 29 tokens"
        assert now() - began < 0.1

    scenario(test)


def test_resumed_request_prefers_what_it_needs_to_equal_numerics() -> None:
    async def test(rig: Rig) -> None:
        old = await rig.worker("decode-0")
        await rig.worker("decode-1", numerics=OTHER, features=GRAMMAR)
        await rig.submit(submit_of("r0", numerics=NUMERICS, needs=GRAMMAR))
        assert await placed_on(rig, num=1) == "decode-1"
        assert old.started == []

    scenario(test)


def test_worker_that_refuses_what_it_announced_is_followed_by_the_next() -> None:
    """It was replaced by an older one, whose first heartbeat was lost. Others still go there."""

    def refuse(start: StartDecode) -> DecodeStarted:
        if start.request.needs:
            raise WorkerUnfit("decode-0 does not have grammar/1")
        return DecodeStarted(placement_id=start.placement_id, num_cached_tokens=0)

    async def test(rig: Rig) -> None:
        stale = await rig.worker("decode-0", features=GRAMMAR, reply=refuse)
        await rig.worker("decode-1", features=GRAMMAR, num_free_blocks=100)
        number = 0
        while not stale.started:
            await rig.submit(submit_of(f"r{number}", needs=GRAMMAR))
            number += 1
            assert await placed_on(rig, num=number) == "decode-1"
        await rig.submit(submit_of("plain", excluded_workers=("decode-1",)))
        assert await placed_on(rig, num=number + 1) == "decode-0"

    scenario(test)


def test_worker_loses_and_gains_features_with_its_heartbeats() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("decode-0", features=GRAMMAR)
        await rig.submit(submit_of("r0", needs=GRAMMAR))
        assert await placed_on(rig, num=1) == "decode-0"
        for number, features in enumerate(((), GRAMMAR), start=2):
            await worker.health_monitor.stop()
            worker.features = features
            await worker.join()
            await asyncio.sleep(0.5)
            await rig.submit(submit_of(f"r{number}", needs=GRAMMAR))
            result = await rig.result(num=number)
            assert isinstance(result, Placed if features else PlacementFailed)

    scenario(test)


def test_missing_features_in_allowed_regions_are_named_with_the_regions() -> None:
    async def test(rig: Rig) -> None:
        await rig.worker("decode-0", region="eu")
        await rig.worker("decode-1", region="us", features=GRAMMAR)
        await rig.submit(submit_of("r0", needs=GRAMMAR, allowed_regions=("eu",)))
        failed = await rig.result()
        assert isinstance(failed, PlacementFailed)
        assert failed.failure.code == "no_capable_worker"
        assert "in the allowed regions (eu)" in failed.failure.message

    scenario(test, region="eu")


def test_class_that_no_worker_serves_is_named() -> None:
    request = msgspec.structs.replace(
        submit_of("r0", allowed_regions=("de", "fr")).request, region_class="eu"
    )
    error = _unserved(request, has_capable=True)
    assert error.message == (
        "no worker in the allowed regions of the class 'eu' (de, fr) serves 'm' now"
    )
