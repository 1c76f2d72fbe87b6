"""Blocks of region classes in the index: apart from all others, and only where they may be."""

from __future__ import annotations

import asyncio

from services.kv_index.class_indexes import ClassIndexes
from services.kv_index.service import KvIndexService
from shared.errors import OutsideRegions
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.messages import BlockPage
from shared.regions.region_check import RegionCheck
from shared.regions.region_classes import region_classes
from tests.services.kv_index.rig import (
    FORMAT,
    CacheWorker,
    Rig,
    _run,
    all_matches,
    block,
    eventually,
)
from tests.support.world.bus import SimulatedBus
from tests.support.world.clock import run

CLASSES = region_classes(["eu=fr"])


class ClassRig(Rig):
    """An index in `fr`, and one in `us`; workers and a scheduler in `fr`."""

    def __init__(self) -> None:
        super().__init__()
        self.here = self.replica("kv_index-2", RegionCheck("fr", CLASSES))
        self.outside = self.replica("kv_index-1", RegionCheck("us", CLASSES))
        self.scheduler = self.bus("scheduler-1")

    def bus(self, process_id: str) -> SimulatedBus:
        return self.network.bus(process_id, regions=RegionCheck("fr", CLASSES))

    async def start(self) -> tuple[CacheWorker, CacheWorker]:
        """Returns a worker with blocks of the class, and one with others."""
        for each in (self.here, self.outside):
            await each.start()
        await asyncio.sleep(1.5)
        of_class = CacheWorker(self.bus("decode-1"), self.clock, "decode", 1, "eu")
        plain = CacheWorker(self.bus("decode-2"), self.clock, "decode", 2)
        for worker in (of_class, plain):
            await worker.join()
        return of_class, plain

    async def stop(self) -> None:
        for each in (self.here, self.outside):
            await each.stop()


def holds(index: KvIndexService, worker_id: str, number: int) -> bool:
    return index.indexes.holds(worker_id, block(number))


def test_blocks_of_a_class_are_found_by_its_matches_alone() -> None:
    async def test() -> None:
        rig = ClassRig()
        of_class, plain = await rig.start()
        await of_class.store(1, 2)
        await plain.store(1)
        await eventually(lambda: holds(rig.here, "decode-1", 2) and holds(rig.here, "decode-2", 1))
        assert await all_matches(rig.scheduler, 1, 2, region_class="eu") == (
            "exact",
            {"decode-1": 2},
        )
        assert await all_matches(rig.scheduler, 1, 2) == ("exact", {"decode-2": 1})
        assert not holds(rig.outside, "decode-1", 1) and holds(rig.outside, "decode-2", 1)
        await rig.stop()

    run(test())


def test_lost_last_event_of_a_class_is_detected_by_heartbeats() -> None:
    async def test() -> None:
        rig = ClassRig()
        of_class, _ = await rig.start()
        await of_class.store(1, 2)
        await eventually(lambda: holds(rig.here, "decode-1", 2))
        rig.network.is_dropped = lambda subject, sender, receiver: subject.endswith("kv_events")
        await of_class.remove(2)
        rig.network.is_dropped = None
        await asyncio.sleep(3 * HEARTBEAT_INTERVAL_S)
        assert not holds(rig.here, "decode-1", 2) and holds(rig.here, "decode-1", 1)
        await rig.stop()

    run(test())


def test_worker_that_has_no_more_blocks_of_a_class_leaves_it() -> None:
    async def test() -> None:
        rig = ClassRig()
        of_class, _ = await rig.start()
        await of_class.store(1)
        await eventually(lambda: holds(rig.here, "decode-1", 1))
        of_class.region_class, of_class.held, of_class.sequence_number = "", {}, 0
        await eventually(lambda: not holds(rig.here, "decode-1", 1))
        await rig.stop()

    run(test())


def test_first_replica_in_the_class_leads_its_pins() -> None:
    async def test() -> None:
        rig = ClassRig()
        await rig.start()
        here, outside = rig.here._keeper, rig.outside._keeper
        assert [here._leads(each) for each in ("", "eu")] == [False, True]
        assert outside._leads("") and outside._own_classes == ("",)
        await rig.stop()

    run(test())


def test_process_of_another_region_neither_sends_nor_asks() -> None:
    async def test() -> None:
        rig = ClassRig()
        await rig.start()
        stranger = rig.network.bus("scheduler-2", regions=RegionCheck("us", CLASSES))
        for bus in (stranger, rig.scheduler_bus):
            try:
                await all_matches(bus, 1, region_class="eu")
            except OutsideRegions:
                continue
            raise AssertionError(bus.process_id)
        assert stranger.regions.num_refused == 1
        await rig.stop()

    run(test())


def test_public_prefix_is_looked_up_among_blocks_without_a_class() -> None:
    indexes = ClassIndexes(["eu"])
    numbers = {"": {"w1": [1, 2], "w2": [1], "w3": [1, 2]}, "eu": {"w1": [3, 4], "w2": [3]}}
    for region_class, workers in numbers.items():
        index = indexes.of(region_class)
        for worker_id, held in workers.items():
            index.add_worker(worker_id, "m", "r1", FORMAT)
            index.begin_resync(worker_id)
            page = BlockPage(
                worker_id=worker_id,
                epoch=1,
                sequence_number=1,
                model="m",
                revision="r1",
                kv_format=FORMAT,
                stored=(_run(held),),
            )
            index.add_page(page)
            index.finish_resync(worker_id)
    hashes = [block(number) for number in (1, 2, 3, 4, 5)]
    found = indexes.match("eu", hashes, "m", "r1", num_public=2)
    assert {each.worker_id: each.num_blocks for each in found.matches} == {
        "w1": 4,
        "w2": 1,
        "w3": 2,
    }
    assert found.state == "exact"
    own = indexes.match("eu", hashes[2:], "m", "r1")
    assert {each.worker_id: each.num_blocks for each in own.matches} == {"w1": 2, "w2": 1}
