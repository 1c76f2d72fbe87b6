"""The order in which the jobs of tenants run."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.preparation.fair_turns import FairTurns


def order(
    jobs: str, *, cpu_s: Mapping[str, float] | None = None, limit: str = "", num_processes: int = 1
) -> list[str]:
    """Runs one job after another. `jobs`: a letter per job, its tenant, in order of arrival.

    `cpu_s`: of each tenant's jobs. `limit`: tenants whose jobs reach the CPU limit.
    """
    costs = {} if cpu_s is None else cpu_s
    turns: FairTurns[str] = FairTurns(max_running=num_processes)
    for number, tenant_id in enumerate(jobs):
        turns.add(tenant_id, f"{tenant_id}{number}")
    taken = []
    while (turn := turns.next()) is not None:
        tenant_id, job = turn
        taken.append(job)
        turns.ended(tenant_id, costs.get(tenant_id, 1.0), reached_limit=tenant_id in limit)
    return taken


def test_each_tenant_has_one_turn_in_a_round() -> None:
    assert order("aaaabbc") == ["a0", "b4", "c6", "a1", "b5", "a2", "a3"]


def test_tenant_with_least_cpu_seconds_is_first_in_its_round() -> None:
    assert order("aabbcc", cpu_s={"a": 2.0, "b": 0.1, "c": 0.5}) == [
        *("a0", "b2", "c4"),
        *("b3", "c5", "a1"),
    ]


def test_cheap_jobs_do_not_overtake_a_waiting_tenant_twice() -> None:
    taken = order("abbbb", cpu_s={"a": 2.0, "b": 0.001})
    assert taken == ["a0", "b1", "b2", "b3", "b4"]
    assert order("aabbb", cpu_s={"a": 2.0, "b": 0.001}) == ["a0", "b2", "b3", "a1", "b4"]


def test_tenant_that_reached_the_cpu_limit_is_last_in_its_round() -> None:
    assert order("aabbcc", cpu_s={"a": 0.1, "b": 0.2, "c": 0.3}, limit="a") == [
        *("a0", "b2", "c4"),
        *("b3", "c5", "a1"),
    ]


def test_tenant_runs_at_most_its_share_of_processes() -> None:
    turns: FairTurns[int] = FairTurns(max_running=1)
    for job in range(3):
        turns.add("a", job)
    assert turns.next() == ("a", 0)
    assert turns.next() is None
    turns.add("b", 3)
    assert turns.next() == ("b", 3)
    turns.ended("a", 2.0)
    assert turns.next() == ("a", 1)


def test_removed_job_is_not_taken_and_idle_tenants_are_forgotten() -> None:
    turns: FairTurns[int] = FairTurns(max_running=1)
    turns.add("a", 1)
    turns.add("a", 2)
    turns.remove("a", 1)
    turns.remove("b", 1)
    assert turns.next() == ("a", 2)
    turns.ended("a", 1e-9)
    for job in range(2):
        turns.add("b", job)
        assert turns.next() == ("b", job)
        turns.ended("b", 1.0)
    assert list(turns._tenants) == ["b"]


def test_jobs_that_are_alike_share_a_turn() -> None:
    turns: FairTurns[str] = FairTurns(max_running=1)
    for tenant_id, job in (("a", "a1"), ("a", "a2"), ("b", "b1"), ("a", "A"), ("a", "a3")):
        turns.add(tenant_id, job)
    assert turns.next() == ("a", "a1")
    assert turns.take_more("a", 9, str.islower) == ["a2"]
    assert turns.next() == ("b", "b1")
    turns.put_back("a", ["a1", "a2"])
    turns.ended("a", 1.0)
    assert turns.next() == ("a", "a1")
    assert turns.take_more("a", 1, str.islower) == ["a2"]
