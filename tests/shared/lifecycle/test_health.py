from __future__ import annotations

import pytest

from shared.lifecycle.health import FORGET_AFTER_S, MAX_PEERS, SILENCE_LIMIT_S, TICK_S, Fleet, Loss
from shared.messages import Heartbeat, ProcessState, WorkerLoad

OWN = "own"
INTERVAL_S = 0.25


def beat(
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


class Watch:
    """Plays time in ticks; `speaks` says who is heard, `steps` whose engine moves."""

    def __init__(self) -> None:
        self.fleet = Fleet(OWN)
        self.now = 100.0
        self.number = 0
        self.step = 0
        self.lost: list[tuple[str, Loss, float]] = []

    def play(self, seconds: float, speaks: tuple[str, ...], *, moves: bool = True) -> None:
        """Everyone in `speaks` beats at INTERVAL_S; the fleet ticks at TICK_S."""
        end, next_beat = self.now + seconds, self.now
        while self.now < end:
            if self.now >= next_beat:
                self.number += 1
                self.step += moves
                for process_id in speaks:
                    self.hear(beat(process_id, self.number, step=self.step))
                next_beat += INTERVAL_S
            self.now += TICK_S
            for process_id, loss in self.fleet.tick(self.now):
                self.lost.append((process_id, loss, self.now))

    def hear(self, heartbeat: Heartbeat) -> None:
        loss = self.fleet.observe(heartbeat, self.now)
        if loss is not None:
            self.lost.append((heartbeat.process_id, loss, self.now))

    def losses(self) -> list[tuple[str, Loss]]:
        return [(process_id, loss) for process_id, loss, _ in self.lost]


@pytest.fixture
def watch() -> Watch:
    watch = Watch()
    watch.play(2.0, (OWN, "a", "b"))
    assert watch.lost == []
    return watch


def live(watch: Watch) -> list[str]:
    return sorted(each.process_id for each in watch.fleet.live("decode"))


def test_who_falls_silent_is_lost_within_the_limit(watch: Watch) -> None:
    silent_from = watch.now
    watch.play(2.0, (OWN, "b"))
    assert watch.losses() == [("a", Loss.UNRESPONSIVE)]
    assert SILENCE_LIMIT_S - INTERVAL_S <= watch.lost[0][2] - silent_from <= SILENCE_LIMIT_S + 0.2
    assert live(watch) == ["b"]
    watch.play(0.5, (OWN, "a", "b"))
    assert live(watch) == ["a", "b"]
    assert watch.fleet.is_live("a")


def test_a_process_without_an_engine_is_live_again_as_soon_as_it_is_heard(watch: Watch) -> None:
    watch.hear(beat("gateway", 1))
    watch.play(2.0, (OWN, "a", "b"))
    assert watch.losses() == [("gateway", Loss.UNRESPONSIVE)]
    watch.hear(beat("gateway", 2))
    assert watch.fleet.is_live("gateway")
    assert not watch.fleet.is_lost("gateway")


def test_who_beats_without_a_step_is_stuck_beyond_its_budget(watch: Watch) -> None:
    stuck_from = watch.now
    watch.play(3.0, (OWN, "a", "b"), moves=False)
    assert watch.losses() == [("a", Loss.STUCK), ("b", Loss.STUCK)]
    assert watch.lost[0][2] - stuck_from <= 0.5 + SILENCE_LIMIT_S + 0.3
    assert live(watch) == []
    watch.play(0.5, (OWN, "a", "b"))
    assert live(watch) == ["a", "b"]


def test_a_long_step_is_no_loss_within_its_announced_budget(watch: Watch) -> None:
    watch.step += 1
    watch.number += 1
    for _ in range(20):
        watch.number += 1
        watch.hear(beat("a", watch.number, step=watch.step, budget_s=30.0))
        watch.hear(beat("b", watch.number, step=watch.step, budget_s=30.0))
        watch.hear(beat(OWN, watch.number))
        watch.now += INTERVAL_S
        watch.lost += [(*each, watch.now) for each in watch.fleet.tick(watch.now)]
    assert watch.lost == []


def test_nobody_is_suspected_when_all_fall_silent_at_once(watch: Watch) -> None:
    watch.play(30.0, ())
    assert watch.lost == []
    watch.play(5.0, (OWN, "a", "b"))
    assert watch.lost == []


def test_after_the_silence_of_all_peers_get_a_full_period(watch: Watch) -> None:
    watch.play(5.0, ())
    watch.play(0.9, (OWN, "b"))
    assert watch.lost == []
    watch.play(1.0, (OWN, "b"))
    assert watch.losses() == [("a", Loss.UNRESPONSIVE)]


def test_a_bus_that_is_back_only_for_moments_makes_nobody_silent(watch: Watch) -> None:
    """Between its outages this process is connected again sooner than others."""
    watch.play(1.0, ())
    for _ in range(5):
        watch.hear(beat(OWN, watch.number))
        watch.play(0.4, ())
        watch.now += 0.15
    watch.hear(beat(OWN, watch.number))
    watch.play(0.5, ())
    assert watch.lost == []
    watch.play(2.0, (OWN, "b"))
    assert watch.losses() == [("a", Loss.UNRESPONSIVE)]


def test_a_watcher_that_stalled_judges_nobody_for_a_period(watch: Watch) -> None:
    watch.now += 5.0  # this process itself was frozen
    watch.play(0.9, (OWN,))
    assert watch.lost == []
    watch.play(0.5, (OWN, "a", "b"))
    assert watch.lost == []


def test_a_new_epoch_is_a_new_process(watch: Watch) -> None:
    watch.hear(beat("a", 1, step=1, epoch=2))
    assert watch.losses() == [("a", Loss.RESTARTED)]
    assert live(watch) == ["a", "b"]


def test_stopped_is_gone_at_once_and_only_once(watch: Watch) -> None:
    watch.hear(beat("a", watch.number + 1, state="stopped"))
    watch.hear(beat("a", watch.number + 2, state="stopped"))
    assert watch.losses() == [("a", Loss.STOPPED)]
    assert watch.fleet.heartbeat_of("a") is None


def test_draining_is_alive_but_takes_no_work(watch: Watch) -> None:
    watch.hear(beat("a", watch.number + 1, state="draining"))
    assert live(watch) == ["b"]
    assert watch.fleet.is_live("a")


def test_an_old_heartbeat_changes_nothing(watch: Watch) -> None:
    watch.hear(beat("a", 1, state="draining"))
    assert live(watch) == ["a", "b"]


def test_the_long_lost_are_forgotten(watch: Watch) -> None:
    watch.play(FORGET_AFTER_S + 2, (OWN, "b"))
    assert watch.fleet.heartbeat_of("a") is None
    assert watch.losses() == [("a", Loss.UNRESPONSIVE)]


def test_without_its_own_echo_it_judges_nobody() -> None:
    watch = Watch()
    watch.play(1.0, ("a",))
    watch.play(5.0, ())
    assert watch.lost == []


def test_strangers_are_bounded_and_those_known_stay() -> None:
    fleet = Fleet(OWN)
    for number in range(MAX_PEERS + 10):
        fleet.observe(beat(f"stranger-{number}", 1), 0.0)
    assert fleet.heartbeat_of(f"stranger-{MAX_PEERS}") is None
    fleet.observe(beat("stranger-0", 2), 1.0)
    newest = fleet.heartbeat_of("stranger-0")
    assert newest is not None and newest.sequence_number == 2
    assert sum(1 for _ in fleet.live("decode")) == MAX_PEERS


def test_who_is_late_is_asked_and_gone_if_nobody_has_its_name(watch: Watch) -> None:
    watch.play(0.35, (OWN, "b"))
    (last,) = watch.fleet.late(watch.now)
    assert last.process_id == "a"
    assert watch.fleet.mark_disconnected(last, watch.now) is Loss.DISCONNECTED
    assert live(watch) == ["b"]
    assert watch.fleet.mark_disconnected(last, watch.now) is None
    assert watch.fleet.late(watch.now) == []
    watch.play(2.0, (OWN, "b"))
    assert watch.losses() == []  # told once


def test_who_spoke_after_the_question_is_not_gone(watch: Watch) -> None:
    watch.play(0.35, (OWN, "b"))
    (last,) = watch.fleet.late(watch.now)
    watch.play(0.1, (OWN, "a", "b"))
    assert watch.fleet.mark_disconnected(last, watch.now) is None
    assert live(watch) == ["a", "b"]


def test_after_a_gap_of_its_own_echo_a_watcher_asks_nobody(watch: Watch) -> None:
    """The bus was away for a moment: others may still be on their way back."""
    watch.play(0.55, ())
    watch.play(0.9, (OWN,))
    assert watch.fleet.late(watch.now) == []
