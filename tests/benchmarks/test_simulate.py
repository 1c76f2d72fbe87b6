"""The simulation benchmark at a small size: its figures must match the simulated requests."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from benchmarks.simulate.figures import figures_of
from benchmarks.simulate.policies import Hearth, LeastLoaded, PrefixOnly, RoundRobin
from benchmarks.simulate.simulation import FLOODER, FleetShape, Simulation
from benchmarks.simulate.sites import Costs
from benchmarks.simulate.trace import TraceRequest, read_trace, write_trace
from benchmarks.simulate.workloads import agents, flood, spread

MOONCAKE_LINE = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}'
)


@pytest.mark.parametrize(
    "policy", [Hearth(Random(0).randrange), RoundRobin(), LeastLoaded(), PrefixOnly()]
)
def test_every_request_ends_once(policy: Hearth | RoundRobin | LeastLoaded | PrefixOnly) -> None:
    outcome = Simulation(FleetShape(3, 3), policy).run(spread(60, 4))
    figures = figures_of(outcome)
    assert figures.num_requests == len(outcome.decision_ns) == 60
    assert figures.hit_ratio == 0  # no two prompts share a prefix
    assert outcome.num_prompt_tokens == sum(each.input_length for each in spread(60, 4))


def test_expired_requests_are_counted() -> None:
    """One overloaded site: some requests complete, some are rejected, the others expire."""
    shape = FleetShape(1, 1, Costs(num_blocks=60), deadline_s=5.0)
    outcome = Simulation(shape, RoundRobin()).run(spread(200, 100))
    figures = figures_of(outcome)
    assert figures.num_expired > 10
    assert figures.num_requests + figures.num_refused + figures.num_expired == 200


def test_request_latency_is_sum_of_its_parts() -> None:
    shape = FleetShape(1, 1)
    request = TraceRequest(0.0, 2001, 11, [1, 2, 3, 4])
    outcome = Simulation(shape, RoundRobin()).run([request])
    costs = shape.costs
    step_s = costs.decode_step_s + costs.decode_sequence_s + 2012 * costs.decode_kv_token_s
    prefill_s = costs.prefill_s(2000)
    assert outcome.ttft_s[0] == pytest.approx(prefill_s + 2 * costs.handoff_overhead_s + step_s)
    assert outcome.tpot_s[0] == pytest.approx(step_s)


def test_sessions_hit_their_cached_history() -> None:
    hits = {}
    for policy in (Hearth(Random(0).randrange), LeastLoaded()):
        outcome = Simulation(FleetShape(6, 6), policy).run(agents(60, 0.5))
        hits[policy.name] = figures_of(outcome).hit_ratio
    assert hits["hearth"] > 0.75 > 0.6 > hits["least loaded"]


def test_flood_does_not_change_normal_requests() -> None:
    def normal_requests(flood_per_s: float) -> list[tuple[float, int]]:
        trace = flood(50, 10, flood_per_s, flooder=FLOODER)
        return [(each.timestamp, each.input_length) for each in trace if each.tenant != FLOODER]

    assert normal_requests(100.0) == normal_requests(0.0)


def test_mooncake_trace_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{MOONCAKE_LINE}\n")
    requests = list(read_trace(path))
    assert requests == [TraceRequest(27482, 6955, 52, [46, 47])]
    write_trace(path, [*requests, *spread(0, 1)])
    assert list(read_trace(path)) == requests


@pytest.mark.parametrize(
    "line", ["{}", "[1]", MOONCAKE_LINE.replace("6955", "0"), MOONCAKE_LINE.replace("27482", "1")]
)
def test_error_names_invalid_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{MOONCAKE_LINE}\n{line}\n")
    with pytest.raises(ValueError, match=r"trace.jsonl:2: "):
        list(read_trace(path))
