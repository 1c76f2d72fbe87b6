"""The policy's rules one by one, and against random devices and demands."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from services.scheduler.residency.demand_policy import MIN_HOT_S, DemandPolicy
from services.scheduler.residency.lru_policy import LruPolicy
from services.scheduler.residency.parking_victims import chosen_victims, freed_bytes, missing_bytes
from services.scheduler.residency.view import (
    Action,
    Demands,
    Device,
    ModelDemand,
    ModelId,
    Park,
    Policy,
    Resident,
    Wake,
)
from shared.messages import ModelState

NOW, WEIGHTS, FLOOR = 1000.0, 10, 20
TARGET_S = 2.0


def name(model: str) -> ModelId:
    return model, "r1"


def resident(model: str, state: ModelState = "standby", **fields: object) -> Resident:
    sizes = {"weights_bytes": WEIGHTS, "kv_floor_bytes": FLOOR}
    sizes |= {"kv_bytes": FLOOR} if state == "hot" else {}
    times = {"wake_s": 0.2, "start_s": 3.0, "hot_s": 60.0}
    options = sizes | times | fields
    return Resident(model=name(model), state=state, **options)  # type: ignore[arg-type]


def device(*models: Resident, host_id: str = "h", num_hot: int = 1, **fields: object) -> Device:
    num_resident = sum(not each.is_cold for each in models)
    used = sum(WEIGHTS + each.kv_bytes for each in models if not each.is_cold)
    options = {"budget_bytes": num_resident * WEIGHTS + num_hot * FLOOR, "used_bytes": used}
    found = {each.model: each for each in models}
    return Device(host_id=host_id, name="cpu", models=found, **(options | fields))  # type: ignore[arg-type]


def waiting(
    num: int = 1, *, age_s: float = 0.0, deadline_s: float = 60.0, **more: object
) -> ModelDemand:
    oldest_at = NOW - age_s
    demand = ModelDemand(
        num_queued=num, oldest_at=oldest_at, deadline_at=NOW + deadline_s, rate=0.01
    )
    return replace(demand, last_used_at=NOW, **more)  # type: ignore[arg-type]


def used(rate: float, *, idle_s: float = 0.0) -> ModelDemand:
    return ModelDemand(rate=rate, last_used_at=NOW - idle_s)


def decide(
    devices: list[Device], demands: dict[str, ModelDemand], now: float = NOW
) -> list[Action]:
    named = {name(model): demand for model, demand in demands.items()}
    return DemandPolicy(ttft_target_s=TARGET_S).decide(devices, named, now)


def wake(model: str, host_id: str = "h") -> Wake:
    return Wake(host_id, *name(model))


def park(model: str, host_id: str = "h") -> Park:
    return Park(host_id, *name(model))


def test_nothing_is_woken_without_a_request() -> None:
    assert decide([device(resident("a"))], {"a": used(5.0)}) == []


def test_standby_comes_before_cold_and_free_memory_before_parking() -> None:
    cold = device(resident("a", "cold"), host_id="cold", num_hot=3)
    full = device(resident("a"), resident("b", "hot"), host_id="full")
    free = device(resident("a"), host_id="free")
    assert decide([cold, full, free], {"a": waiting()}) == [wake("a", "free")]
    late = {"a": waiting(age_s=TARGET_S)}
    assert decide([cold, full], late) == [park("b", "full"), wake("a", "full")]
    room = replace(cold, budget_bytes=WEIGHTS + FLOOR)
    assert decide([room], {"a": waiting()}) == [wake("a", "cold")]


def test_caches_above_their_floors_are_room() -> None:
    grown = device(resident("a"), resident("b", "hot", kv_bytes=2 * FLOOR), num_hot=2)
    assert decide([grown], {"a": waiting()}) == [wake("a")]


def test_processes_in_standby_are_room_for_a_cold_model() -> None:
    full = device(resident("a", "cold"), resident("b"), resident("c"), num_hot=1)
    assert decide([full], {"a": waiting()}) == [wake("a")]
    hot = device(resident("a", "cold"), resident("b", "hot"), num_hot=1)
    late = {"a": waiting(age_s=TARGET_S)}
    assert decide([hot], late) == [park("b"), wake("a")]


def test_requests_gather_while_a_model_that_is_used_sooner_would_be_parked() -> None:
    busy = [device(resident("a"), resident("b", "hot"))]
    rates = {"b": used(0.5)}
    assert decide(busy, rates | {"a": waiting()}) == []
    assert decide(busy, rates | {"a": waiting(age_s=TARGET_S)}) == [park("b"), wake("a")]
    soon = waiting(deadline_s=0.6)  # as long as its wake and some slack
    assert decide(busy, rates | {"a": soon}) == [park("b"), wake("a")]


def test_model_that_is_used_much_later_is_parked_at_once() -> None:
    devices = [device(resident("a"), resident("b", "hot"))]
    demands = {"b": used(0.5, idle_s=500.0), "a": waiting(rate=0.5)}
    assert decide(devices, demands) == [park("b"), wake("a")]


def test_model_with_the_least_cost_of_being_parked_is_chosen() -> None:
    hot = [resident(each, "hot") for each in ("often", "seldom", "slow")]
    hot[2] = replace(hot[2], wake_s=10.0)
    rates = {"often": used(0.9), "seldom": used(0.1), "slow": used(0.1)}
    late = {"a": waiting(age_s=TARGET_S)}
    devices = [device(resident("a"), *hot, num_hot=3)]
    assert decide(devices, rates | late) == [park("seldom"), wake("a")]
    hot[1] = replace(hot[1], priority=4)
    devices = [device(resident("a"), *hot, num_hot=3)]
    assert decide(devices, rates | late) == [park("often"), wake("a")]


def test_idle_model_is_parked_before_one_with_requests() -> None:
    hot = [resident("running", "hot", num_running=1), resident("idle", "hot")]
    demands = {"running": used(0.01), "idle": used(0.9), "a": waiting(age_s=TARGET_S)}
    devices = [device(resident("a"), *hot, num_hot=2)]
    assert decide(devices, demands) == [park("idle"), wake("a")]
    queued = demands | {"idle": waiting(rate=0.9)}
    assert decide(devices, queued)[0] == park("running")


@pytest.mark.parametrize("policy", [DemandPolicy(), LruPolicy()])
def test_pinned_model_is_never_parked(policy: Policy) -> None:
    devices = [device(resident("a"), resident("b", "hot", is_pinned=True))]
    demands = {name("a"): waiting(age_s=50.0, deadline_s=0.1)}
    assert policy.decide(devices, demands, NOW) == []


def test_model_is_hot_for_a_minimum_time_unless_a_deadline_would_be_missed() -> None:
    devices = [device(resident("a"), resident("b", "hot", hot_s=0.5 * MIN_HOT_S))]
    assert decide(devices, {"a": waiting(age_s=10.0)}) == []
    urgent = waiting(age_s=10.0, deadline_s=0.5)
    assert decide(devices, {"a": urgent}) == [park("b"), wake("a")]


def test_device_wakes_one_model_at_a_time() -> None:
    devices = [device(resident("a"), resident("b"), num_hot=2)]
    demands = {"a": waiting(age_s=1.0), "b": waiting(age_s=2.0)}
    assert decide(devices, demands) == [wake("b")]
    assert decide([replace(devices[0], is_waking=True)], demands) == []


def test_wakes_that_are_due_together_begin_earlier() -> None:
    """A device wakes one model after the other."""
    hot = resident("b", "hot", num_running=1)
    devices = [device(resident("a"), resident("c"), hot)]
    nearly = waiting(age_s=TARGET_S - 0.5)
    assert decide(devices, {"a": nearly, "b": used(0.5)}) == []
    together = {"a": nearly, "c": nearly, "b": used(0.5)}
    assert decide(devices, together) == [park("b"), wake("a")]


def test_short_wait_for_a_device_is_better_than_a_cold_start_elsewhere() -> None:
    waking = device(resident("a"), host_id="waking", is_waking=True)
    cold = device(resident("a", "cold"), host_id="cold", budget_bytes=WEIGHTS + FLOOR)
    assert decide([waking, cold], {"a": waiting()}) == []
    assert decide([waking, cold], {"a": waiting(age_s=TARGET_S)}) == [wake("a", "cold")]


def test_model_is_not_woken_twice() -> None:
    under_way = resident("a", is_under_way=True, ready_at=NOW + 1.0)
    other = device(resident("a"), host_id="other")
    assert decide([device(under_way), other], {"a": waiting()}) == []
    too_late = waiting(deadline_s=0.9)  # but not for the other host
    assert decide([device(under_way), other], {"a": too_late}) == [wake("a", "other")]


def test_long_queue_gets_a_replica_where_there_is_room() -> None:
    hot = device(resident("a", "hot", num_running=8))
    free = device(resident("a"), host_id="free")
    assert decide([hot, free], {"a": waiting(9, age_s=1.0)}) == [wake("a", "free")]
    assert decide([hot, free], {"a": waiting(9, age_s=0.1)}) == []
    full = device(resident("a"), resident("b", "hot", num_running=1), host_id="full")
    assert decide([hot, full], {"a": waiting(9, age_s=10.0), "b": used(0.5)}) == []


def test_second_replica_is_the_first_to_be_parked() -> None:
    hot = [resident("twice", "hot"), resident("once", "hot")]
    devices = [
        device(resident("a"), *hot, num_hot=2),
        device(resident("twice", "hot"), host_id="other"),
    ]
    demands = {"twice": used(0.9), "once": used(0.1), "a": waiting(age_s=TARGET_S)}
    assert decide(devices, demands) == [park("twice"), wake("a")]


def test_refused_host_is_not_asked_and_avoided_one_only_without_another() -> None:
    refusing = device(resident("a", is_refused=True), host_id="refusing")
    stuck = device(resident("a", is_avoided=True), host_id="stuck")
    cold = device(resident("a", "cold"), host_id="cold", num_hot=3, budget_bytes=100)
    demands = {"a": waiting()}
    assert decide([refusing, stuck, cold], demands) == [wake("a", "cold")]
    assert decide([refusing, stuck], demands) == [wake("a", "stuck")]
    assert decide([refusing], demands) == []


def test_requests_limited_to_some_hosts_are_served_there() -> None:
    hot = device(resident("a", "hot"), host_id="near")
    far = device(resident("a"), host_id="far")
    limited = waiting(hosts=frozenset({"far"}))
    assert decide([hot, far], {"a": limited}) == [wake("a", "far")]


# ── random ───────────────────────────────────────────────────────────────────────────────────────


def random_case(random: Random) -> tuple[list[Device], Demands]:
    names = [f"m{index}" for index in range(6)]
    states: tuple[ModelState, ...] = ("standby", "standby", "hot", "hot", "cold", "parking")
    devices = []
    for host in range(random.choice((1, 2, 3))):
        models = [
            resident(
                each,
                random.choice(states),
                num_running=random.choice((0, 0, 3)),
                hot_s=random.choice((0.0, 60.0)),
                wake_s=random.choice((0.1, 0.5)),
                is_pinned=random.random() < 0.2,
                is_under_way=random.random() < 0.1,
                kv_floor_bytes=random.choice((FLOOR, 2 * FLOOR)),
                kv_bytes=2 * FLOOR,
            )
            for each in names
        ]
        used_bytes = sum(WEIGHTS + 2 * FLOOR * (each.state == "hot") for each in models)
        spare = random.choice((0, FLOOR, 3 * FLOOR))
        devices.append(
            device(
                *models,
                host_id=f"h{host}",
                used_bytes=used_bytes,
                budget_bytes=used_bytes + spare,
                is_waking=random.random() < 0.2,
            )
        )
    demands = {
        name(each): waiting(
            random.choice((0, 1, 9)),
            age_s=random.uniform(0.0, 4.0),
            deadline_s=random.choice((0.2, 60.0)),
            rate=random.choice((0.01, 0.5, 3.0)),
        )
        for each in names
    }
    return devices, demands


@pytest.mark.parametrize("policy", [DemandPolicy(), LruPolicy()], ids=["demand", "lru"])
def test_decisions_keep_the_rules(policy: Policy) -> None:
    num_wakes = 0
    for seed in range(1500):
        devices, demands = random_case(Random(seed))
        actions = policy.decide(devices, demands, NOW)
        by_host = {each.host_id: each for each in devices}
        wakes = [each for each in actions if isinstance(each, Wake)]
        num_wakes += len(wakes)
        assert len({each.host_id for each in wakes}) == len(wakes)
        assert len({each.model for each in wakes}) == len(wakes)
        for action in wakes:
            target_device = by_host[action.host_id]
            target = target_device.models[action.model, action.revision]
            parks = [each for each in actions if isinstance(each, Park)]
            victims = [
                target_device.models[each.model, each.revision]
                for each in parks
                if each.host_id == action.host_id
            ]
            assert not target_device.is_waking and target.can_be_woken
            assert demands[target.model].num_queued
            assert all(each.is_hot and not each.is_pinned for each in victims)
            freed = sum(freed_bytes(each, target) for each in victims)
            assert missing_bytes(target_device, target) <= freed, seed
            for each in victims:  # none is parked for nothing
                without = freed - freed_bytes(each, target)
                assert missing_bytes(target_device, target) > without, seed
        hosts_of_wakes = {each.host_id for each in wakes}
        assert {each.host_id for each in actions} == hosts_of_wakes
    assert num_wakes > 500


def test_weights_that_a_parked_model_offloads_are_room() -> None:
    parked, hot = (
        resident(name, state, offloaded_bytes=WEIGHTS - 1)  # type: ignore[arg-type]
        for name, state in (("a", "standby"), ("b", "hot"))
    )
    full = device(parked, hot, budget_bytes=1 + WEIGHTS + FLOOR, used_bytes=1 + WEIGHTS + FLOOR)
    assert missing_bytes(full, parked) == WEIGHTS - 1 + FLOOR
    assert chosen_victims(full, parked, [hot]) == [hot]


def test_no_victims_are_better_than_too_few() -> None:
    full = device(resident("a", kv_floor_bytes=5 * FLOOR), resident("b", "hot"))
    target = full.models[name("a")]
    assert chosen_victims(full, target, [full.models[name("b")]]) is None
