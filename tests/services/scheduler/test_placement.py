from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.placement import LocalPrefill, ModelWorkers, RequestSize, Target, place
from services.scheduler.throughput import Speed
from services.scheduler.worker_table import WorkerRow, WorkerTable
from tests.services.scheduler.plain_placement import PlainScan, is_close
from tests.support.world.randomness import SeededRandomness

D1 = WorkerRow("d1", "bf16/b16", 16, num_free_blocks=1000, num_total_blocks=1000)
D2, D3 = replace(D1, worker_id="d2"), replace(D1, worker_id="d3")
P1, P2 = replace(D1, worker_id="p1"), replace(D1, worker_id="p2")
LONG = RequestSize(
    num_prompt_tokens=1600, num_tokens=1600
)  # 100 blocks, and one for the next token
MEASURED = Speed(is_measured=True)  # 5 ms per step, 0.1 ms per token
HANDOFF_OVERHEAD_S = 0.004
NOW = 50.0
BY_COST = LocalPrefill(always=4, at_most=1_000_000)


def placed(
    needs: RequestSize,
    decodes: list[WorkerRow],
    prefills: list[WorkerRow],
    cached: dict[str, int] | None = None,
    *,
    local_prefill: LocalPrefill = BY_COST,
    excluded: frozenset[str] = frozenset(),
    seed: int = 0,
) -> Target | None:
    return place(
        needs,
        ModelWorkers(WorkerTable(decodes), WorkerTable(prefills), HANDOFF_OVERHEAD_S),
        cached or {},
        local_prefill=local_prefill,
        now=NOW,
        random_below=SeededRandomness(seed).below,
        excluded=excluded,
    )


def prompt(num_tokens: int) -> RequestSize:
    return RequestSize(num_tokens, num_tokens)


def busy_s(worker: WorkerRow, seconds: float) -> WorkerRow:
    return replace(worker, busy_until=NOW + seconds)


@pytest.mark.parametrize(
    ("name", "decodes", "prefills", "cached", "expected"),
    [
        ("no worker", [], [P1], {}, None),
        ("no prefill worker: local", [D1], [], {}, ("d1", ())),
        ("one of each", [D1], [P1], {}, ("d1", ("p1",))),
        ("decode holds all but the last block: local", [D1], [P1], {"d1": 99}, ("d1", ())),
        ("prefill's prefix is credited", [D1], [P1, P2], {"p2": 50}, ("d1", ("p2", "p1"))),
        (
            "prefill queue outweighs its prefix",
            [D1],
            [P1, replace(P2, busy_until=NOW + 0.09)],
            {"p2": 50},
            ("d1", ("p1", "p2")),
        ),
        ("another kv format cannot push", [D1], [replace(P1, kv_format="fp32")], {}, ("d1", ())),
        ("a worker does not push to itself", [D1], [D1, P1], {"d1": 1}, ("d1", ("p1",))),
        ("both roles in one worker, alone: local", [D1], [D1], {}, ("d1", ())),
        (
            "too few free blocks",
            [replace(D1, num_free_blocks=100), replace(D2, num_free_blocks=101)],
            [P1],
            {},
            ("d2", ("p1",)),
        ),
        ("decode KV load", [replace(D1, decode_tokens=5000), D2], [P1], {}, ("d2", ("p1",))),
        ("waiting requests count", [replace(D1, num_waiting=2), D2], [], {}, ("d2", ())),
        (
            "a long prefix is worth some load",
            [replace(D1, decode_tokens=20_000), D2],
            [P1],
            {"d1": 99},
            ("d1", ()),
        ),
        (
            "a long prefix is not worth any load",
            [replace(D1, decode_tokens=100_000), D2],
            [P1],
            {"d1": 99},
            ("d2", ("p1",)),
        ),
        (
            "a prefill worker with too small a cache",
            [D1],
            [replace(P1, num_total_blocks=100)],
            {},
            ("d1", ()),
        ),
        ("an avoided worker", [replace(D1, is_avoided=True), D2], [], {}, ("d2", ())),
        (
            "the faster worker",
            [replace(D1, speed=Speed(token_s=1e-3)), D2],
            [],
            {},
            ("d2", ()),
        ),
        (
            "a slow link: local",
            [D1],
            [replace(P1, speed=Speed(push_token_s=3e-4))],
            {},
            ("d1", ()),
        ),
    ],
)
def test_placement_table(
    name: str,
    decodes: list[WorkerRow],
    prefills: list[WorkerRow],
    cached: dict[str, int],
    expected: tuple[str, tuple[str, ...]] | None,
) -> None:
    target = placed(LONG, decodes, prefills, cached)
    found = None if target is None else (target.decode_id, target.prefill_candidates)
    assert found == expected


def test_only_long_prompts_are_handed_off() -> None:
    """As on a CPU: 5 ms per step, 10,000 tokens/s; six requests run on the decode worker."""
    decode = replace(D1, num_running=6, speed=MEASURED)
    prefill = replace(P1, speed=MEASURED)
    is_remote = {
        num_tokens: bool(placed(prompt(num_tokens), [decode], [prefill]).prefill_candidates)
        for num_tokens in (20, 100, 200, 1000, 8000)
    }
    assert is_remote == {20: False, 100: False, 200: True, 1000: True, 8000: True}


def test_local_prefill_limits_forbid_or_force_a_handoff() -> None:
    never, always = LocalPrefill(always=2000, at_most=2000), LocalPrefill(always=4, at_most=4)
    assert placed(LONG, [D1], [P1], local_prefill=never).prefill_candidates == ()
    short = prompt(20)
    assert placed(short, [D1], [P1], local_prefill=always).prefill_candidates == ("p1",)
    assert placed(short, [D1], [], local_prefill=always).prefill_candidates == ()


def test_target_has_at_most_three_prefill_candidates() -> None:
    prefills = [replace(P1, worker_id=f"p{number}") for number in range(9)]
    assert len(placed(LONG, [D1], prefills).prefill_candidates) == 3


def test_fully_cached_prompt_needs_no_prefill_worker() -> None:
    target = placed(LONG, [D1], [P1], {"d1": 100}, local_prefill=LocalPrefill(0, 0))
    assert (target.prefill_candidates, target.num_uncached_tokens) == ((), 0)


def test_a_move_prefills_nowhere_without_room() -> None:
    """Its worker, which has both roles, holds its prefix, and has no room for its prompt."""
    moved = replace(LONG, num_room_tokens=2000)
    cached, both = {"d1": 100}, [D1, D2]
    at_first = placed(LONG, both, both, cached, excluded=frozenset({"d1"}))
    assert at_first is not None and at_first.prefill_candidates == ("d1",)
    for prefills, candidates in ((both, ()), ([*both, P1], ("p1",))):
        target = placed(moved, both, prefills, cached, excluded=frozenset({"d1"}))
        assert target is not None
        assert (target.decode_id, target.prefill_candidates) == ("d2", candidates)
        assert target.num_uncached_tokens == 1599


def test_received_outputs_need_blocks_too() -> None:
    resumed = RequestSize(num_prompt_tokens=1600, num_tokens=1632)
    assert placed(resumed, [replace(D1, num_free_blocks=102)], []) is None
    assert placed(resumed, [replace(D1, num_free_blocks=103)], []).num_blocks == 103


def test_context_must_hold_the_request_to_its_end() -> None:
    """Also when the worker is the cheapest, holds the prefix or is the affinity key's."""
    small, large = replace(D1, max_context_tokens=1799), replace(D2, decode_tokens=50_000)
    for affinity_key in ("", "a", "b", "c"):
        needs = RequestSize(1600, 1650, affinity_key, num_context_tokens=1800)
        assert placed(needs, [small, large], [], {"d1": 100}).decode_id == "d2"
        assert placed(needs, [small], [], {"d1": 100}) is None
    fits = RequestSize(1600, 1650, num_context_tokens=1799)
    assert placed(fits, [small, large], [], {"d1": 100}).decode_id == "d1"


def test_choices_larger_than_the_cache_take_an_unused_one() -> None:
    """Each of three choices fits alone: they take turns."""
    needs = RequestSize(1600, 1600 + 3 * 8000, num_context_tokens=10_000)
    assert placed(needs, [D1], []).decode_id == "d1"
    assert placed(needs, [replace(D1, num_free_blocks=999)], []) is None


def test_equal_workers_share_the_load() -> None:
    firsts: Counter[str] = Counter()
    randomness = SeededRandomness(1)
    workers = ModelWorkers(WorkerTable([D1, D2, D3]), WorkerTable([P1, P2]), HANDOFF_OVERHEAD_S)
    for _ in range(600):
        target = place(
            LONG, workers, {}, local_prefill=BY_COST, now=NOW, random_below=randomness.below
        )
        assert target is not None
        firsts[target.decode_id] += 1
        firsts[target.prefill_candidates[0]] += 1
    assert all(150 < firsts[name] < 250 for name in ("d1", "d2", "d3"))
    assert all(250 < firsts[name] < 350 for name in ("p1", "p2"))


def test_requests_of_a_hot_prefix_spread_over_workers() -> None:
    """At first only d1 has the prefix in its cache; each worker that decodes it adds it."""
    workers = {name: replace(D1, worker_id=name) for name in ("d1", "d2", "d3")}
    cached, count = {"d1": 99}, Counter[str]()
    for number in range(300):
        name = placed(LONG, list(workers.values()), [P1], cached, seed=number).decode_id
        cached[name] = 99
        count[name] += 1
        load = workers[name].decode_tokens + 1600
        workers[name] = replace(workers[name], decode_tokens=load)
    assert min(count.values()) > 60


def test_affinity_key_selects_one_worker_up_to_twice_the_cost() -> None:
    session = replace(LONG, affinity_key="session-7")
    first = placed(session, [D1, D2, D3], [P1]).decode_id
    for seed in range(20):
        assert placed(session, [D3, D2, D1], [P1], seed=seed).decode_id == first
    others = [each for each in (D1, D2, D3) if each.worker_id != first]
    loaded = replace(D1, worker_id=first, decode_tokens=20_000)
    assert placed(session, [loaded, *others], [P1]).decode_id == first
    loaded = replace(loaded, decode_tokens=100_000)
    assert placed(session, [loaded, *others], [P1]).decode_id != first


def test_affinity_key_decides_between_equal_prefixes() -> None:
    """All workers have the system prompt in their cache; the session has no history yet."""
    session, cached = replace(LONG, affinity_key="session-7"), {"d1": 50, "d2": 50, "d3": 50}
    first = placed(session, [D1, D2, D3], []).decode_id
    loads = [replace(each, decode_tokens=500 * (each.worker_id == first)) for each in (D1, D2, D3)]
    assert placed(session, loads, [], cached).decode_id == first
    deeper = {**cached, next(each.worker_id for each in loads if not each.decode_tokens): 99}
    assert placed(session, loads, [], deeper).decode_id != first


def test_sessions_spread_and_lost_worker_moves_only_its_own() -> None:
    decodes = [replace(D1, worker_id=f"d{number}") for number in range(8)]
    sessions = [replace(LONG, affinity_key=f"session-{number}") for number in range(400)]
    before = {each.affinity_key: placed(each, decodes, []).decode_id for each in sessions}
    assert set(Counter(before.values())) == {each.worker_id for each in decodes}
    assert max(Counter(before.values()).values()) < 90
    after = {each.affinity_key: placed(each, decodes[1:], []).decode_id for each in sessions}
    assert {key for key in before if before[key] != after[key]} == {
        key for key in before if before[key] == "d0"
    }


def test_workers_outside_allowed_regions_are_not_tried() -> None:
    eu = replace(LONG, allowed_regions=("eu",))
    d_eu, d_us = replace(D1, region="eu", decode_tokens=90_000), replace(D2, region="us")
    p_eu, p_us = replace(P1, region="eu", busy_until=NOW + 0.3), replace(P2, region="us")
    target = placed(eu, [d_eu, d_us, D3], [p_eu, p_us])
    assert (target.decode_id, target.prefill_candidates) == ("d1", ())
    target = placed(eu, [d_eu, d_us], [replace(p_eu, busy_until=0.0), p_us])
    assert (target.decode_id, target.prefill_candidates) == ("d1", ("p1",))
    assert placed(eu, [d_us, D3], [p_eu]) is None
    no_region = replace(LONG, allowed_regions=("",))
    assert placed(no_region, [D3], []) is None


def test_worker_with_enough_work_gets_no_request() -> None:
    decode, prefill = replace(D1, speed=MEASURED), replace(P1, speed=MEASURED)
    full = busy_s(prefill, 0.5)
    assert placed(LONG, [busy_s(decode, 1.0)], [full]) is None
    assert placed(LONG, [decode], [busy_s(prefill, 0.05)]).prefill_candidates == ()
    busy_decode = busy_s(decode, 1.0)
    assert placed(LONG, [busy_decode], [busy_s(prefill, 0.05)]).prefill_candidates == ("p1",)
    # The prompt waits, because waiting costs less than a local prefill.
    crowded = replace(decode, num_running=100)
    assert placed(LONG, [crowded], [full]) is None
    unmeasured = replace(full, speed=Speed())
    assert placed(LONG, [crowded], [unmeasured]).prefill_candidates == ("p1",)


def test_no_prompt_waits_for_blocks_that_answers_hold() -> None:
    """The worker that holds its prefix has no room for the rest, and another is idle."""
    full, idle = replace(D1, num_free_blocks=0), D2
    cached = {"d1": 90}
    passing = placed(LONG, [full, idle], [full, idle], cached)
    assert passing is not None
    assert (passing.decode_id, passing.prefill_candidates) == ("d2", ("d1",))
    held = [replace(each, also_decodes=True) for each in (full, idle)]
    target = placed(LONG, held, held, cached)
    assert target is not None
    assert (target.decode_id, target.prefill_candidates) == ("d2", ())
    alone = placed(LONG, held, held, cached, local_prefill=LocalPrefill(0, 0))
    assert alone is not None and alone.prefill_candidates == ("d1",)  # it may compute no more


names = [f"w{number}" for number in range(7)]
speeds = st.builds(
    Speed,
    step_s=st.sampled_from([0.0, 0.005, 0.05]),
    token_s=st.sampled_from([1e-5, 1e-4, 1e-3]),
    push_token_s=st.sampled_from([1e-7, 1e-5, 1e-3]),
    is_measured=st.booleans(),
)


@st.composite
def workers(draw: st.DrawFn) -> list[WorkerRow]:
    chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=6))
    counts = st.sampled_from([0, 1, 100, 5000])
    return [
        WorkerRow(
            worker_id=name,
            kv_format=draw(st.sampled_from(["bf16", "fp8"])),
            block_size=draw(st.sampled_from([16, 32])),
            num_free_blocks=draw(st.sampled_from([0, 20, 21, 500])),
            num_total_blocks=draw(st.sampled_from([10, 20, 21, 500])),
            num_running=draw(st.integers(0, 20)),
            num_waiting=draw(st.integers(0, 2)),
            busy_until=NOW + draw(st.sampled_from([-10.0, 0.0, 0.01, 0.3])),
            decode_tokens=draw(counts),
            region=draw(st.sampled_from(["", "eu", "us"])),
            speed=draw(speeds),
            max_context_tokens=draw(st.sampled_from([320, 500, 100_000])),
            is_avoided=draw(st.integers(0, 9)) == 0,
            features=draw(st.sampled_from([frozenset(), frozenset("a"), frozenset("ab")])),
            push_free_at=NOW + draw(st.sampled_from([-10.0, 0.0, 0.02, 0.5])),
            also_decodes=draw(st.booleans()),
        )
        for name in chosen
    ]


@given(
    workers(),
    workers(),
    st.integers(1, 700),
    st.integers(0, 100),
    st.integers(0, 400),
    st.dictionaries(st.sampled_from([*names, "unknown"]), st.integers(0, 50)),
    st.sampled_from([(), ("eu",), ("eu", "us"), ("asia",)]),
    st.sampled_from([(), ("a",), ("b", "a"), ("c",)]),
    st.frozensets(st.sampled_from(names), max_size=2),
    st.sampled_from([BY_COST, LocalPrefill(0, 0), LocalPrefill(100, 300)]),
)
def test_placement_equals_the_plain_scan(
    decodes: list[WorkerRow],
    prefills: list[WorkerRow],
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_remaining_tokens: int,
    cached: dict[str, int],
    regions: tuple[str, ...],
    features: tuple[str, ...],
    excluded: frozenset[str],
    local_prefill: LocalPrefill,
) -> None:
    num_tokens = num_prompt_tokens + num_output_tokens
    needs = RequestSize(
        num_prompt_tokens,
        num_tokens,
        num_context_tokens=num_tokens + num_remaining_tokens,
        allowed_regions=regions,
        features=features,
    )
    scan = PlainScan(
        needs, decodes, prefills, cached, HANDOFF_OVERHEAD_S, local_prefill, NOW, excluded
    )
    target = placed(
        needs, decodes, prefills, cached, local_prefill=local_prefill, excluded=excluded
    )
    best = scan.best()
    assert (target is None) == (not best)
    if target is None:
        return
    assert target.decode_id in best
    decode = next(each for each in decodes if each.worker_id == target.decode_id)
    prefill_option = scan.prefill_option(decode)
    assert bool(target.prefill_candidates) == prefill_option.is_remote
    assert target.num_blocks == needs.num_blocks(decode.block_size)
    by_name = {each.worker_id: each for each in prefills}
    if not prefill_option.is_remote:
        assert target.num_uncached_tokens == scan.uncached(decode)
        return
    assert target.num_uncached_tokens == scan.uncached(by_name[target.prefill_candidates[0]])
    ranks = {name: (closed, seconds) for closed, seconds, name in scan.handoffs(decode)}
    found = [ranks[name] for name in target.prefill_candidates]
    best_ranks = sorted(ranks.values())[:3]
    assert [closed for closed, _ in found] == [closed for closed, _ in best_ranks]
    assert all(is_close(a, b) for (_, a), (_, b) in zip(found, best_ranks, strict=True))


@given(st.lists(st.tuples(st.sampled_from(names), st.booleans(), st.integers(0, 99))))
def test_table_has_the_last_row_put_for_each_worker(steps: list[tuple[str, bool, int]]) -> None:
    table, held = WorkerTable(), dict[str, WorkerRow]()
    for name, is_put, number in steps:
        if is_put:
            region = f"region-{number % 3}"
            held[name] = replace(D1, worker_id=name, num_free_blocks=number, region=region)
            table.put(held[name])
        else:
            held.pop(name, None)
            table.remove(name)
    assert sorted(table.ids) == sorted(held)
    for name, worker in held.items():
        row = table.row_of(name)
        assert row is not None and table.ids[row] == name
        assert table.free_tokens[row] == 16 * worker.num_free_blocks
        assert table.in_regions((worker.region,))[row]
        assert table.block_sizes[row] == 16
