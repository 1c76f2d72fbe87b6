from __future__ import annotations

import pytest

from shared.lifecycle.health import (
    FORGET_AFTER_S,
    MAX_PEERS,
    MAX_WITH_SITES,
    SILENCE_LIMIT_S,
    TICK_S,
    Fleet,
    Loss,
)
from shared.messages import Heartbeat, ProcessState, WorkerLoad

OWN = "own"
INTERVAL_S = 0.25


def heartbeat_from(
    process_id: str,
    number: int,
    *,
    step: int | None = None,
    budget_s: float = 0.5,
    epoch: int = 1,
    state: ProcessState = "ready",
) -> Heartbeat:
    load = None if step is None else WorkerLoad(step=step, step_budget_s=budget_s)
    return Heartbeat(
        process_id=process_id,
        epoch=epoch,
        sequence_number=number,
        roles=("decode",),
        state=state,
        interval_s=INTERVAL_S,
        load=load,
    )


class FleetSimulation:
    """A fleet on simulated time. Records losses: process id, kind, time."""

    def __init__(self) -> None:
        self.fleet = Fleet(OWN)
        self.now = 100.0
        self.number = 0
        self.step = 0
        self.lost: list[tuple[str, Loss, float]] = []

    def run(self, seconds: float, senders: tuple[str, ...], *, engines_step: bool = True) -> None:
        """Each of `senders` sends a heartbeat every INTERVAL_S; the fleet ticks every TICK_S."""
        end, next_heartbeat_at = self.now + seconds, self.now
        while self.now < end:
            if self.now >= next_heartbeat_at:
                self.number += 1
                self.step += engines_step
                for process_id in senders:
                    self.receive(heartbeat_from(process_id, self.number, step=self.step))
                next_heartbeat_at += INTERVAL_S
            self.now += TICK_S
            for process_id, loss in self.fleet.tick(self.now):
                self.lost.append((process_id, loss, self.now))

    def receive(self, heartbeat: Heartbeat) -> None:
        loss = self.fleet.observe(heartbeat, self.now)
        if loss is not None:
            self.lost.append((heartbeat.process_id, loss, self.now))

    def losses(self) -> list[tuple[str, Loss]]:
        return [(process_id, loss) for process_id, loss, _ in self.lost]


@pytest.fixture
def sim() -> FleetSimulation:
    sim = FleetSimulation()
    sim.run(2.0, (OWN, "a", "b"))
    assert sim.lost == []
    return sim


def live(sim: FleetSimulation) -> list[str]:
    return sorted(each.process_id for each in sim.fleet.live("decode"))


def test_silent_peer_is_lost_within_limit(sim: FleetSimulation) -> None:
    silent_since = sim.now
    sim.run(2.0, (OWN, "b"))
    assert sim.losses() == [("a", Loss.UNRESPONSIVE)]
    assert SILENCE_LIMIT_S - INTERVAL_S <= sim.lost[0][2] - silent_since <= SILENCE_LIMIT_S + 0.2
    assert live(sim) == ["b"]
    sim.run(0.5, (OWN, "a", "b"))
    assert live(sim) == ["a", "b"]
    assert sim.fleet.is_live("a")


def test_peer_without_engine_is_live_after_one_heartbeat(sim: FleetSimulation) -> None:
    sim.receive(heartbeat_from("gateway", 1))
    sim.run(2.0, (OWN, "a", "b"))
    assert sim.losses() == [("gateway", Loss.UNRESPONSIVE)]
    sim.receive(heartbeat_from("gateway", 2))
    assert sim.fleet.is_live("gateway")
    assert not sim.fleet.is_lost("gateway")


def test_peer_without_steps_is_stuck_after_its_budget(sim: FleetSimulation) -> None:
    stuck_since = sim.now
    sim.run(3.0, (OWN, "a", "b"), engines_step=False)
    assert sim.losses() == [("a", Loss.STUCK), ("b", Loss.STUCK)]
    assert sim.lost[0][2] - stuck_since <= 0.5 + SILENCE_LIMIT_S + 0.3
    assert live(sim) == []
    sim.run(0.5, (OWN, "a", "b"))
    assert live(sim) == ["a", "b"]


def test_long_step_within_its_budget_is_no_loss(sim: FleetSimulation) -> None:
    sim.step += 1
    sim.number += 1
    for _ in range(20):
        sim.number += 1
        sim.receive(heartbeat_from("a", sim.number, step=sim.step, budget_s=30.0))
        sim.receive(heartbeat_from("b", sim.number, step=sim.step, budget_s=30.0))
        sim.receive(heartbeat_from(OWN, sim.number))
        sim.now += INTERVAL_S
        sim.lost += [(*each, sim.now) for each in sim.fleet.tick(sim.now)]
    assert sim.lost == []


def test_no_loss_if_all_peers_are_silent(sim: FleetSimulation) -> None:
    sim.run(30.0, ())
    assert sim.lost == []
    sim.run(5.0, (OWN, "a", "b"))
    assert sim.lost == []


def test_peers_get_full_period_after_bus_outage(sim: FleetSimulation) -> None:
    sim.run(5.0, ())
    sim.run(0.9, (OWN, "b"))
    assert sim.lost == []
    sim.run(1.0, (OWN, "b"))
    assert sim.losses() == [("a", Loss.UNRESPONSIVE)]


def test_no_loss_while_bus_reconnects_repeatedly(sim: FleetSimulation) -> None:
    """Between the outages, this process reconnects sooner than its peers."""
    sim.run(1.0, ())
    for _ in range(5):
        sim.receive(heartbeat_from(OWN, sim.number))
        sim.run(0.4, ())
        sim.now += 0.15
    sim.receive(heartbeat_from(OWN, sim.number))
    sim.run(0.5, ())
    assert sim.lost == []
    sim.run(2.0, (OWN, "b"))
    assert sim.losses() == [("a", Loss.UNRESPONSIVE)]


def test_no_loss_for_one_period_after_own_stall(sim: FleetSimulation) -> None:
    sim.now += 5.0  # this process itself was frozen
    sim.run(0.9, (OWN,))
    assert sim.lost == []
    sim.run(0.5, (OWN, "a", "b"))
    assert sim.lost == []


def test_new_epoch_is_a_restart(sim: FleetSimulation) -> None:
    sim.receive(heartbeat_from("a", 1, step=1, epoch=2))
    assert sim.losses() == [("a", Loss.RESTARTED)]
    assert live(sim) == ["a", "b"]


def test_two_processes_with_one_id_are_one_loss(sim: FleetSimulation) -> None:
    """Their heartbeats alternate, as those of two live processes do."""
    for number in range(1, 9):
        sim.receive(heartbeat_from("a", number, step=number, epoch=2))
        sim.receive(heartbeat_from("a", sim.number + number, step=number))
        sim.run(INTERVAL_S, (OWN, "b"))
    assert sim.losses() == [("a", Loss.RESTARTED), ("a", Loss.DOUBLED)]
    assert live(sim) == ["b"]


@pytest.mark.parametrize("staying", [1, 2])
def test_doubled_peer_takes_work_once_one_process_is_left(
    sim: FleetSimulation, staying: int
) -> None:
    last = sim.number
    for number in range(1, 4):
        sim.receive(heartbeat_from("a", number, step=number, epoch=2))
        sim.receive(heartbeat_from("a", last + number, step=number))
        sim.run(INTERVAL_S, (OWN, "b"))
    assert live(sim) == ["b"]
    for number in range(4, 16):
        own_number = number if staying == 2 else last + number
        sim.receive(heartbeat_from("a", own_number, step=number, epoch=staying))
        sim.run(INTERVAL_S, (OWN, "b"))
    assert live(sim) == ["a", "b"]
    assert sim.losses() == [("a", Loss.RESTARTED), ("a", Loss.DOUBLED)]


def test_late_heartbeat_of_a_replaced_process_means_nothing(sim: FleetSimulation) -> None:
    sim.receive(heartbeat_from("a", 1, step=1, epoch=2))
    sim.receive(heartbeat_from("a", sim.number + 1, step=1))
    sim.receive(heartbeat_from("a", sim.number + 2, state="stopped"))
    assert sim.losses() == [("a", Loss.RESTARTED)]
    assert live(sim) == ["a", "b"]


def test_heartbeat_of_own_id_with_another_epoch_is_no_echo() -> None:
    sim = FleetSimulation()
    sim.fleet = Fleet(OWN, own_epoch=7)
    sim.run(3.0, (OWN, "a"))
    assert not sim.fleet.can_judge(sim.now)


def test_stopped_peer_is_lost_once(sim: FleetSimulation) -> None:
    sim.receive(heartbeat_from("a", sim.number + 1, state="stopped"))
    sim.receive(heartbeat_from("a", sim.number + 2, state="stopped"))
    assert sim.losses() == [("a", Loss.STOPPED)]
    assert sim.fleet.heartbeat_of("a") is None


def test_draining_peer_is_live_but_accepts_no_work(sim: FleetSimulation) -> None:
    sim.receive(heartbeat_from("a", sim.number + 1, state="draining"))
    assert live(sim) == ["b"]
    assert sim.fleet.is_live("a")


def test_old_heartbeat_is_ignored(sim: FleetSimulation) -> None:
    sim.receive(heartbeat_from("a", 1, state="draining"))
    assert live(sim) == ["a", "b"]


def test_lost_peer_is_forgotten_later(sim: FleetSimulation) -> None:
    sim.run(FORGET_AFTER_S + 2, (OWN, "b"))
    assert sim.fleet.heartbeat_of("a") is None
    assert sim.losses() == [("a", Loss.UNRESPONSIVE)]


def test_no_loss_without_own_heartbeat() -> None:
    sim = FleetSimulation()
    sim.run(1.0, ("a",))
    sim.run(5.0, ())
    assert sim.lost == []


def test_new_peers_beyond_limit_are_ignored() -> None:
    fleet = Fleet(OWN)
    for number in range(MAX_PEERS + 10):
        fleet.observe(heartbeat_from(f"stranger-{number}", 1), 0.0)
    assert fleet.heartbeat_of(f"stranger-{MAX_PEERS}") is None
    fleet.observe(heartbeat_from("stranger-0", 2), 1.0)
    newest = fleet.heartbeat_of("stranger-0")
    assert newest is not None and newest.sequence_number == 2
    assert sum(1 for _ in fleet.live("decode")) == MAX_PEERS


def test_other_sites_leave_room_for_the_peers_of_this_one() -> None:
    fleet = Fleet(OWN)
    for number in range(MAX_PEERS):
        fleet.observe(heartbeat_from(f"b/gateway/{number}", 1), 0.0)
    fleet.observe(heartbeat_from("a", 1), 0.0)
    assert sum(1 for _ in fleet.live("decode")) == MAX_WITH_SITES + 1
    assert fleet.is_live("a")


def test_late_peer_without_responder_is_lost(sim: FleetSimulation) -> None:
    sim.run(0.35, (OWN, "b"))
    (last,) = sim.fleet.late(sim.now)
    assert last.process_id == "a"
    assert sim.fleet.mark_disconnected(last, sim.now) is Loss.DISCONNECTED
    assert live(sim) == ["b"]
    assert sim.fleet.mark_disconnected(last, sim.now) is None
    assert sim.fleet.late(sim.now) == []
    sim.run(2.0, (OWN, "b"))
    assert sim.losses() == []  # reported only once


def test_peer_with_newer_heartbeat_is_not_lost(sim: FleetSimulation) -> None:
    sim.run(0.35, (OWN, "b"))
    (last,) = sim.fleet.late(sim.now)
    sim.run(0.1, (OWN, "a", "b"))
    assert sim.fleet.mark_disconnected(last, sim.now) is None
    assert live(sim) == ["a", "b"]


def test_no_peer_is_late_after_gap_in_own_heartbeats(sim: FleetSimulation) -> None:
    """The bus was disconnected, so peers may still be reconnecting."""
    sim.run(0.55, ())
    sim.run(0.9, (OWN,))
    assert sim.fleet.late(sim.now) == []
