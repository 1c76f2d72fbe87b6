"""Fleets in which a second process starts with the id of another one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.lifecycle.health import Fleet as Peers
from shared.lifecycle.health import Loss, Peer, restarted_peer
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import Heartbeat, SamplingParams
from tests.simulation.plan import Fault, Plan
from tests.simulation.scenarios.fleets import plan_with
from tests.simulation.simulation import run_plan


def twin(target: str) -> Fault:
    return Fault(at_s=1.0, kind="twin", target=target)


def long_answers(plan: Plan) -> Plan:
    """Answers that take a second, so that many heartbeats arrive meanwhile."""
    sampling = [SamplingParams(seed=n, max_tokens=200) for n in range(len(plan.requests))]
    requests = zip(plan.requests, sampling, strict=True)
    return replace(plan, requests=tuple(replace(r, sampling=s) for r, s in requests))


@pytest.mark.parametrize("target", ["decode-0", "gateway-0", "scheduler-0", "prefill-0"])
def test_second_process_with_an_id_costs_no_request(target: str) -> None:
    outcome = run_plan(plan_with(twin(target), num_prefill=1))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 60}
    assert outcome.events["name_in_use"] >= 1


def test_second_process_of_the_only_decode_worker_costs_no_request() -> None:
    outcome = run_plan(long_answers(plan_with(twin("decode-0"), num_decode=1, num_requests=20)))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 20}


def test_oracle_finds_two_processes_that_take_each_other_for_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted bug: no process leaves, and each change of the epoch is a restart."""

    def restarted(self: Peers, peer: Peer, heartbeat: Heartbeat, now: float) -> Loss:
        self._peers[heartbeat.process_id] = restarted_peer(peer, heartbeat, now)
        return Loss.RESTARTED

    def stay(self: HealthMonitor, message: Heartbeat) -> None:
        pass

    monkeypatch.setattr(Peers, "_on_replaced_epoch", restarted)
    monkeypatch.setattr(HealthMonitor, "_on_same_name", stay)
    outcome = run_plan(long_answers(plan_with(twin("decode-0"), num_decode=1, num_requests=20)))
    assert outcome.wrongs
    assert outcome.endings["finished"] < 20
