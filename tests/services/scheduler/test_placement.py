from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from services.scheduler.placement import Needs, Target, Worker, place
from tests.simulation.randomness import SeededRandomness

D1 = Worker("d1", "bf16/b16", 16, num_free_blocks=1000, num_total_blocks=1000)
D2, D3 = replace(D1, worker_id="d2"), replace(D1, worker_id="d3")
P1, P2 = replace(D1, worker_id="p1"), replace(D1, worker_id="p2")
LONG = Needs(num_prompt_tokens=1600, num_tokens=1600)  # 100 blocks, and one for the next token


def placed(
    needs: Needs,
    decodes: list[Worker],
    prefills: list[Worker],
    cached: dict[str, int] | None = None,
    *,
    local_prefill_tokens: int = 16,
    seed: int = 0,
) -> list[Target]:
    return place(
        needs,
        decodes,
        prefills,
        cached or {},
        local_prefill_tokens=local_prefill_tokens,
        draw=SeededRandomness(seed).below,
    )


@pytest.mark.parametrize(
    ("name", "decodes", "prefills", "cached", "expected"),
    [
        ("no worker", [], [P1], {}, []),
        ("no prefill worker: local", [D1], [], {}, [("d1", ())]),
        ("one of each", [D1], [P1], {}, [("d1", ("p1",))]),
        ("decode holds all but the last block: local", [D1], [P1], {"d1": 99}, [("d1", ())]),
        ("decode holds all but two blocks", [D1], [P1], {"d1": 98}, [("d1", ("p1",))]),
        ("prefill's prefix is credited", [D1], [P1, P2], {"p2": 50}, [("d1", ("p2", "p1"))]),
        (
            "prefill queue outweighs its prefix",
            [D1],
            [P1, replace(P2, prefill_tokens=900)],
            {"p2": 50},
            [("d1", ("p1", "p2"))],
        ),
        (
            "another kv format cannot push",
            [D1],
            [replace(P1, kv_format="fp32/b16")],
            {},
            [("d1", ())],
        ),
        ("a worker does not push to itself", [D1], [D1, P1], {}, [("d1", ("p1",))]),
        ("both roles in one worker, alone: local", [D1], [D1], {}, [("d1", ())]),
        (
            "too few free blocks",
            [replace(D1, num_free_blocks=100), replace(D2, num_free_blocks=101)],
            [P1],
            {},
            [("d2", ("p1",))],
        ),
        (
            "the lighter decode first",
            [replace(D1, decode_tokens=5000), D2],
            [P1],
            {},
            [("d2", ("p1",)), ("d1", ("p1",))],
        ),
        (
            "waiting requests count",
            [replace(D1, num_waiting=2), D2],
            [],
            {},
            [("d2", ()), ("d1", ())],
        ),
        (
            "a long prefix is worth some load",
            [replace(D1, decode_tokens=20_000), D2],
            [P1],
            {"d1": 99},
            [("d1", ()), ("d2", ("p1",))],
        ),
        (
            "but not any load",
            [replace(D1, decode_tokens=100_000), D2],
            [P1],
            {"d1": 99},
            [("d2", ("p1",)), ("d1", ())],
        ),
        (
            "a prefill worker whose whole cache is too small",
            [D1],
            [replace(P1, num_total_blocks=100)],
            {},
            [("d1", ())],
        ),
    ],
)
def test_placement_table(
    name: str,
    decodes: list[Worker],
    prefills: list[Worker],
    cached: dict[str, int],
    expected: list[tuple[str, tuple[str, ...]]],
) -> None:
    targets = placed(LONG, decodes, prefills, cached)
    found = [(target.decode.worker_id, target.prefill_candidates) for target in targets]
    assert found == expected


def test_at_most_three_prefill_candidates() -> None:
    prefills = [replace(P1, worker_id=f"p{number}") for number in range(9)]
    assert len(placed(LONG, [D1], prefills)[0].prefill_candidates) == 3


def test_a_wholly_cached_prompt_needs_no_prefill_worker() -> None:
    target = placed(LONG, [D1], [P1], {"d1": 100}, local_prefill_tokens=0)[0]
    assert (target.prefill_candidates, target.num_uncached_tokens) == ((), 0)


def test_received_outputs_need_room_too() -> None:
    resumed = Needs(num_prompt_tokens=1600, num_tokens=1632)
    assert placed(resumed, [replace(D1, num_free_blocks=102)], []) == []
    assert placed(resumed, [replace(D1, num_free_blocks=103)], [])[0].num_blocks == 103


def test_equal_workers_share_the_load() -> None:
    firsts: Counter[str] = Counter()
    randomness = SeededRandomness(1)
    for _ in range(600):
        targets = place(
            LONG, [D1, D2, D3], [P1, P2], {}, local_prefill_tokens=16, draw=randomness.below
        )
        firsts[targets[0].decode.worker_id] += 1
        firsts[targets[0].prefill_candidates[0]] += 1
    assert all(150 < firsts[name] < 250 for name in ("d1", "d2", "d3"))
    assert all(250 < firsts[name] < 350 for name in ("p1", "p2"))


def test_a_hot_prefix_does_not_go_to_one_worker() -> None:
    """Only d1 holds it at first; whoever decodes it holds it from then on."""
    workers = {name: replace(D1, worker_id=name) for name in ("d1", "d2", "d3")}
    cached, count = {"d1": 99}, Counter[str]()
    for number in range(300):
        target = placed(LONG, list(workers.values()), [P1], cached, seed=number)[0]
        name = target.decode.worker_id
        cached[name] = 99
        count[name] += 1
        load = workers[name].decode_tokens + 1600
        workers[name] = replace(workers[name], decode_tokens=load)
    assert min(count.values()) > 60


def test_an_affinity_key_names_one_worker_until_it_costs_twice_the_best() -> None:
    session = replace(LONG, affinity_key="session-7")
    first = placed(session, [D1, D2, D3], [P1])[0].decode
    for seed in range(20):
        assert placed(session, [D3, D2, D1], [P1], seed=seed)[0].decode == first
    others = [each for each in (D1, D2, D3) if each != first]
    loaded = replace(first, decode_tokens=100_000)
    assert placed(session, [loaded, *others], [P1])[0].decode in others
