"""Shares of a device's memory, by hand and with random models."""

import random

from services.host.budget import (
    ModelKey,
    ModelMemory,
    choose_device,
    kv_sizes,
    never_fits,
    room_for,
    standby_starts,
)


def memory(name: str, fixed: int = 10, floor: int = 5, **fields: object) -> ModelMemory:
    options = {"weights_bytes": fixed, "process_bytes": 0, "kv_floor_bytes": floor} | fields
    return ModelMemory(key=ModelKey(name, "r1"), **options)  # type: ignore[arg-type]


A, B, C = (memory(name) for name in "abc")


def test_kv_beyond_the_floors_is_shared_by_need() -> None:
    busy = memory("busy", need=3.0)
    sizes = kv_sizes(100, [A, busy, C], {A.key, busy.key})
    assert sizes == {A.key: 5 + 12, busy.key: 5 + 48}  # of 60: 1 to 4


def test_what_a_ceiling_leaves_goes_to_the_others() -> None:
    small = memory("small", kv_ceiling_bytes=8, need=9.0)
    assert kv_sizes(100, [A, small], {A.key, small.key}) == {A.key: 72, small.key: 8}


def test_wake_stops_the_least_wanted_standby() -> None:
    wanted = memory("wanted", is_standby_wanted=True)
    old, new = memory("old", used_at=1.0), memory("new", used_at=2.0)
    idle = [wanted.key, old.key, new.key]
    room = room_for(A, 40, [wanted, old, new], hot=(), stoppable=idle)
    assert room.stops == (old.key,) and room.missing_bytes == 0
    room = room_for(A, 25, [wanted, old, new], hot=(), stoppable=idle)
    assert room.stops == (old.key, new.key)


def test_one_large_standby_is_stopped_instead_of_two() -> None:
    small, large = memory("small", used_at=1.0), memory("large", 30, used_at=2.0)
    room = room_for(A, 30, [small, large], hot=(), stoppable=[small.key, large.key])
    assert room.stops == (large.key,)


def test_hot_models_are_never_in_stops() -> None:
    room = room_for(A, 40, [B, C], hot={B.key, C.key}, stoppable=())
    assert room == type(room)(stops=(), missing_bytes=5)


def test_standby_leaves_room_for_one_wake() -> None:
    assert standby_starts([A, B, C], 35, [], ()) == [C.key, B.key, A.key]
    assert len(standby_starts([A, B, C], 34, [], ())) == 2
    first = memory("first", priority=1)
    assert standby_starts([A, first], 15, [], ()) == [first.key]


def test_five_models_share_a_device_whose_budget_holds_them() -> None:
    models = [memory(f"m{number}") for number in range(5)]
    assert len(standby_starts(models, 5 * 10 + 5, [], ())) == 5


def test_model_larger_than_every_budget_is_named_with_all_sizes() -> None:
    large = memory("large", 3 << 30, floor=1 << 30)
    problem = never_fits(large, {"cpu": 2 << 30, "cuda:0": 1 << 30})
    assert problem == (
        "model large (r1) needs 4 GiB (3 GiB of weights, 0 B for its process, 1 GiB of KV), "
        "and the budget of cpu is 2 GiB"
    )
    assert never_fits(large, {"cpu": 4 << 30}) is None


def test_device_with_most_room() -> None:
    assert choose_device({"cuda:1": 5, "cuda:0": 5, "cpu": 1}) == "cuda:0"


def test_random_shares_stay_in_the_budget() -> None:
    for seed in range(50):
        check_random_shares(seed)


def check_random_shares(seed: int) -> None:
    draw = random.Random(seed)
    models = [
        memory(
            f"m{number}",
            draw.randint(0, 50),
            draw.randint(1, 20),
            kv_ceiling_bytes=draw.choice([draw.randint(20, 60), float("inf")]),
            need=draw.choice([0.0, draw.uniform(0, 1000)]),
        )
        for number in range(draw.randint(1, 8))
    ]
    hot = {each.key for each in models if draw.random() < 0.6}
    budget = draw.randint(1, 600)
    sizes = kv_sizes(budget, models, hot)
    assert set(sizes) == hot
    by_key = {each.key: each for each in models}
    assert all(by_key[key].kv_floor_bytes <= size for key, size in sizes.items())
    assert all(size <= by_key[key].kv_ceiling_bytes for key, size in sizes.items())
    floors = sum(each.kv_floor_bytes for each in models if each.key in hot)
    fixed = sum(each.fixed_bytes for each in models)
    assert fixed + sum(sizes.values()) <= max(budget, fixed + floors)
    if any(sizes[key] < by_key[key].kv_ceiling_bytes for key in hot) and fixed + floors < budget:
        assert budget - fixed - sum(sizes.values()) < len(hot)  # nothing but roundings is left
    target = draw.choice(models)
    idle = {each.key for each in models} - hot - {target.key}
    room = room_for(target, budget, models, hot=hot - {target.key}, stoppable=idle)
    staying = [each for each in models if each.key not in (*room.stops, target.key)]
    least = target.least_hot_bytes + sum(
        each.least_hot_bytes if each.key in hot else each.fixed_bytes for each in staying
    )
    assert max(0, least - budget) == room.missing_bytes
    assert not set(room.stops) - idle
