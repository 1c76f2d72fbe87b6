"""The simulation itself: equal runs, its oracle, and whether it finds planted bugs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from shared.engine.executors.timing_executor import FIRST_TOKEN_ID
from tests.simulation.drawing import plan_of
from tests.simulation.plan import PATIENT_S, POISON, Fault
from tests.simulation.planted import BUGS, Bug, wrongs_of
from tests.simulation.saved import Row, piece_of, rows_of
from tests.simulation.simulation import run_plan, simulate
from tests.simulation.tally import Tally
from tests.simulation.variants import (
    with_hosts,
    with_layer_groups,
    with_rank_groups,
    with_role_changes,
)
from tests.support.grids import in_short_run

ROOT = Path(__file__).parents[2]
_SEEDS = """
345 876 1305 4350 4952 7297 8107 22780 33687 44227 75419 134256 154519 171387 189988 192826 735852
974319
"""
# A second or more each, of kinds that other bugs have, too: the long run alone plants them.
SLOW_BUGS = {
    "a wake may take forever",
    "a host forgets its budget",
    "nothing is parked for others",
    "decode renews no prefill lease",
    "nobody misses a last KV event",
    "nothing is sent again",
    "a site that refuses keeps it",
}
FAILED_ONCE = [int(seed) for seed in _SEEDS.split()]
DIGESTS = """
from tests.simulation.simulation import simulate
print(*(simulate(seed).digest for seed in (3, 14, 65)))
"""


def test_seed_reproduces_a_run_event_by_event() -> None:
    once = [simulate(seed) for seed in (3, 14, 65)]
    again = [simulate(seed) for seed in (65, 14, 3)]
    assert [each.digest for each in once] == [each.digest for each in reversed(again)]
    assert len({each.digest for each in once}) == len(once)
    other = subprocess.run(
        [sys.executable, "-c", DIGESTS],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.split() == [each.digest for each in once]


def test_outcome_has_replay_command_and_explained_failures() -> None:
    plan = plan_of(8)
    forever = Fault(at_s=0.0, kind="kill", target="scheduler-0", comes_back=False)
    single_scheduler = replace(plan, fleet=replace(plan.fleet, num_schedulers=1), faults=(forever,))
    outcome = run_plan(replace(single_scheduler, faults=()))
    assert outcome.wrongs == []
    assert outcome.replay == "scripts/simulate --first 8 --seeds 1"
    assert run_plan(single_scheduler).endings["finished"] == 0  # each failure is explained
    assert run_plan(single_scheduler).wrongs == []


def test_hanging_scheduler_only_delays_a_new_request() -> None:
    """NATS sends the hanging scheduler its share of the tries for three seconds."""
    for seed in range(16):
        plan = plan_of(seed)
        hangs = Fault(at_s=0.0, kind="freeze", target="scheduler-0", duration_s=6.0)
        fleet = replace(plan.fleet, num_schedulers=2, num_decode=2, max_queued_requests=100)
        fleet = replace(fleet, pool_sizes=None, block_sizes=None, delays_s={})
        prompt = tuple(each for each in plan.requests[0].prompt if each != POISON)
        request = replace(plan.requests[0], at_s=0.1, deadline_s=PATIENT_S, leaves_after_s=None)
        request = replace(request, prompt=prompt or (FIRST_TOKEN_ID,), needs=())
        outcome = run_plan(replace(plan, fleet=fleet, requests=(request,), faults=(hangs,)))
        assert (outcome.wrongs, outcome.endings) == ([], {"finished": 1}), seed


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_seed_that_failed_once_passes(seed: int) -> None:
    assert simulate(seed).wrongs == []


@cache
def right_wrongs(variant: str, seed: int) -> list[str]:
    """Of the right code: several bugs are found by one seed."""
    return wrongs_of(variant, seed)


@pytest.mark.parametrize(
    "bug",
    in_short_run([bug for bug in BUGS[::3] if bug.name not in SLOW_BUGS], BUGS),
    ids=lambda bug: bug.name,
)
def test_planted_bug_is_found(bug: Bug) -> None:
    """Uses its stored seed, which is stale once the code that draws from it has changed."""
    assert right_wrongs(bug.variant, bug.found_by) == []
    with bug.planted():
        is_found = bool(bug.wrongs(bug.found_by))
    assert is_found, f"seed {bug.found_by} is stale; this command finds a new one: {bug.search}"


def test_saved_pieces_of_a_sweep_add_up() -> None:
    rows: list[Row] = []
    for first, commit in ((0, "old"), (10, "old"), (20, "new"), (40, "new")):
        tally = Tally(num_schedules=10, cpu_s=0.5, endings=Counter(finished=3))
        if first == 10:
            tally.failed.append(simulate(3))
        rows = rows_of(rows, piece_of(tally, first, 1.0, commit), tally)
    ranges = [(row["first"], row["last"], row["commit"]) for row in rows if "commit" in row]
    assert ranges == [(0, 19, "old"), (20, 29, "new"), (40, 49, "new")]
    assert [row["failed"] for row in rows if "commit" in row] == [1, 0, 0]
    assert {"requests": "finished", "count": 12} in rows
    total = next(row for row in rows if "schedules" in row and "commit" not in row)
    assert (total["schedules"], total["failed"], total["cpu_s"]) == (40, 1, 2.0)


@pytest.mark.parametrize("seed", range(6))
def test_models_with_groups_of_layers_keep_all_promises(seed: int) -> None:
    assert run_plan(with_layer_groups(plan_of(seed))).wrongs == []


@pytest.mark.parametrize("seed", [*range(6), 1809])  # in the last one, devices raise
def test_groups_of_ranks_are_members_like_others(seed: int) -> None:
    """With several steps in flight, and when ranks die or freeze."""
    assert run_plan(with_rank_groups(plan_of(seed))).wrongs == []


@pytest.mark.parametrize("seed", range(12))
def test_changes_of_roles_drop_and_alter_nothing(seed: int) -> None:
    assert run_plan(with_role_changes(plan_of(seed))).wrongs == []


@pytest.mark.parametrize("seed", range(12))
def test_models_of_hosts_are_woken_and_parked(seed: int) -> None:
    assert run_plan(with_hosts(plan_of(seed))).wrongs == []
