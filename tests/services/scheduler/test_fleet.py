"""The scheduler's estimate of the workers' load: heartbeats, plus later assignments."""

from __future__ import annotations

import msgspec
import pytest

from services.scheduler.fleet import WorkerFleet
from services.scheduler.placement import (
    HOME_WAIT_S,
    MAX_HOME_WAIT_S,
    NUM_HOME_PROMPTS,
    LocalPrefill,
    RequestSize,
    Target,
    leaves_home,
    place,
    prompt_s,
)
from services.scheduler.silent_workers import FIRST_CLOSED_S, SilentWorkers
from shared.lifecycle.health import Fleet, Loss
from shared.messages import Heartbeat, Role, WorkerLoad
from tests.support.records import model_card
from tests.support.world.randomness import SeededRandomness

SERVED = ("m", "r1", 16)
THERE = "b/gw/00ff"  # a gateway of another site
CARD = model_card(kv_format="bf16/b16", max_context_tokens=100_000)
NEEDS = RequestSize(num_prompt_tokens=1600, num_tokens=1600)


class Rig:
    def __init__(self) -> None:
        self.health = Fleet("scheduler-0")
        self.workers = WorkerFleet(self.health)
        self.number = 0

    def beat(
        self, worker_id: str, now: float, role: Role = "decode", **changes: object
    ) -> Heartbeat:
        self.number += 1
        load = WorkerLoad(
            step=self.number, step_budget_s=1.0, num_free_blocks=250, num_total_blocks=1000
        )
        heartbeat = Heartbeat(
            process_id=worker_id,
            epoch=1,
            sequence_number=self.number,
            roles=(role,),
            state="ready",
            interval_s=0.25,
            load=load,
            model=CARD,
        )
        heartbeat = msgspec.structs.replace(heartbeat, **changes)
        self.health.observe(heartbeat, now)
        self.workers.on_heartbeat(heartbeat, now)
        return heartbeat

    def place(self, now: float, needs: RequestSize = NEEDS) -> Target | None:
        return place(
            needs,
            self.workers.serving(SERVED),
            {},
            local_prefill=LocalPrefill(4, 1_000_000),
            now=now,
            random_below=SeededRandomness(0).below,
        )

    def assign(self, now: float) -> str | None:
        target = self.place(now)
        if target is None:
            return None
        self.workers.confirm(self.workers.assign(target, NEEDS, now), now)
        return target.decode_id


def test_assignment_counts_until_a_heartbeat_includes_it() -> None:
    rig = Rig()
    rig.beat("d1", 0.0)
    assert [rig.assign(0.01), rig.assign(0.02), rig.assign(0.03)] == ["d1", "d1", None]
    rig.beat("d1", 0.04)  # may have been sent before the assignment
    assert rig.assign(0.04) is None
    rig.beat("d1", 0.25)
    assert rig.assign(0.26) == "d1"


def test_rejected_assignment_does_not_count() -> None:
    rig = Rig()
    rig.beat("d1", 0.0)
    for _ in range(5):
        target = rig.place(0.01)
        assert target is not None
        rig.workers.release(rig.workers.assign(target, NEEDS, 0.01), 0.01)
    rig.workers.avoid("d1")
    assert rig.place(0.02) is None
    assert rig.workers.has_worker(SERVED, ())
    rig.beat("d1", 0.25)
    assert rig.place(0.26) is not None


def test_prompt_counts_on_the_worker_that_computes_it() -> None:
    rig = Rig()
    rig.beat("d1", 0.0)
    rig.beat("p1", 0.0, "prefill")
    target = rig.place(0.0)
    assert target is not None and target.prefill_candidates == ("p1",)
    rig.workers.assign(target, NEEDS, 0.0)
    workers = rig.workers.serving(SERVED)
    assert workers.prefills.busy_until[0] == pytest.approx(1599 * 1e-4)
    assert workers.decodes.busy_until[0] == 0.0
    assert workers.decodes.free_tokens[0] == (250 - 101) * 16


@pytest.mark.parametrize(
    "change",
    [{"state": "draining"}, {"state": "starting"}, {"model": None}, {"load": None}],
)
def test_worker_that_accepts_no_work_gets_none(change: dict[str, object]) -> None:
    rig = Rig()
    rig.beat("d1", 0.0)
    assert rig.workers.has_worker(SERVED, ())
    rig.beat("d1", 0.25, **change)
    assert not rig.workers.has_worker(SERVED, ())
    assert rig.place(0.3) is None
    rig.beat("d1", 0.5)
    assert rig.place(0.5) is not None


def test_lost_worker_is_excluded_until_it_makes_a_step() -> None:
    rig = Rig()
    last = rig.beat("d1", 0.0)
    for tick in range(30):
        own = Heartbeat(
            process_id="scheduler-0",
            epoch=1,
            sequence_number=tick + 1,
            roles=("scheduler",),
            state="ready",
            interval_s=0.25,
        )
        rig.health.observe(own, tick / 10)
        for worker_id, loss in rig.health.tick(tick / 10):
            assert loss is Loss.UNRESPONSIVE
            rig.workers.lost(worker_id)
    assert not rig.workers.has_worker(SERVED, ())
    rig.beat("d1", 3.0, load=last.load)
    assert not rig.workers.has_worker(SERVED, ())
    rig.beat("d1", 3.25)
    assert rig.workers.has_worker(SERVED, ())


def test_old_heartbeat_is_ignored() -> None:
    rig = Rig()
    first = rig.beat("d1", 0.0)
    rig.beat("d1", 0.25, state="draining")
    rig.workers.on_heartbeat(first, 0.3)
    assert not rig.workers.has_worker(SERVED, ())


def test_worker_that_changes_its_model_changes_its_key() -> None:
    rig = Rig()
    rig.beat("d1", 0.0)
    rig.beat("d1", 0.25, model=msgspec.structs.replace(CARD, revision="r2"))
    assert not rig.workers.has_worker(SERVED, ())
    assert rig.workers.has_worker(("m", "r2", 16), ())


def test_block_size_is_part_of_the_key() -> None:
    rig = Rig()
    rig.beat("d1", 0.0, model=msgspec.structs.replace(CARD, block_size=32))
    assert not rig.workers.has_worker(SERVED, ())
    assert rig.workers.has_worker(("m", "r1", 32), ())


@pytest.mark.parametrize(
    ("num_tokens", "workers"),
    [(2000, ["d1", "d2"]), (2001, ["d2"]), (16_000, ["d2"]), (16_001, [])],
)
def test_context_is_the_reported_one_within_the_pool(num_tokens: int, workers: list[str]) -> None:
    rig = Rig()
    rig.beat("d1", 0.0, model=msgspec.structs.replace(CARD, max_context_tokens=2000))
    rig.beat("d2", 0.0)  # 1,000 blocks
    found = [
        each
        for each, other in (("d1", "d2"), ("d2", "d1"))
        if rig.workers.has_worker(SERVED, (other,), num_context_tokens=num_tokens)
    ]
    assert found == workers


def test_worker_regions_are_those_of_the_heartbeats() -> None:
    rig = Rig()
    rig.beat("d1", 0.0, region="eu")
    rig.beat("d2", 0.0)
    assert rig.workers.has_worker(SERVED, (), ("eu",))
    assert not rig.workers.has_worker(SERVED, ("d1",), ("eu",))
    assert not rig.workers.has_worker(SERVED, (), ("us",))
    assert rig.workers.has_worker(SERVED, ("d1",))


def test_worker_that_changes_its_roles_keeps_its_speed_and_its_assignments() -> None:
    rig = Rig()
    busy = WorkerLoad(step=1, step_budget_s=1.0, num_free_blocks=900, num_total_blocks=1000)
    rig.beat("w1", 0.0, load=busy)
    more = {"step": 2, "num_busy_steps": 100, "busy_s": 2.0, "num_computed_prompt_tokens": 5000}
    rig.beat("w1", 0.25, load=msgspec.structs.replace(busy, **more))
    before = rig.workers._known["w1"].worker.speed
    assert before.is_measured
    assert rig.assign(0.26) == "w1"
    rig.beat("w1", 0.27, "prefill", load=msgspec.structs.replace(busy, **more))
    workers = rig.workers.serving(SERVED)
    assert (len(workers.decodes), workers.prefills.ids) == (0, ["w1"])
    assert rig.workers._known["w1"].worker.speed == before
    assert workers.prefills.busy_until[0] > 0.27


@pytest.mark.parametrize(
    ("waited_s", "prompt_s", "is_served_here", "leaves"),
    [
        (0.0, 0.5, False, True),
        (0.0, 0.0, True, False),
        (HOME_WAIT_S + 0.09, 0.0, True, False),
        (HOME_WAIT_S + 0.1, 0.0, True, True),
        (HOME_WAIT_S + 0.1, HOME_WAIT_S / NUM_HOME_PROMPTS, True, True),
        (NUM_HOME_PROMPTS * 0.5 + 0.09, 0.5, True, False),
        (NUM_HOME_PROMPTS * 0.5 + 0.11, 0.5, True, True),
        (MAX_HOME_WAIT_S + 0.11, 60.0, True, True),
    ],
)
def test_requests_leave_home_after_a_wait_or_without_a_worker(
    waited_s: float, prompt_s: float, is_served_here: bool, leaves: bool
) -> None:
    assert leaves_home(waited_s, 0.1, prompt_s, is_served_here=is_served_here) is leaves


def test_a_prompt_takes_the_time_of_the_fastest_worker() -> None:
    rig = Rig()
    assert prompt_s(rig.workers.serving(SERVED), 100) == 0.0
    rig.beat("w1", 0.0)
    token_s = rig.workers.speed("w1").token_s
    assert prompt_s(rig.workers.serving(SERVED), 100) == pytest.approx(100 * token_s)


def test_a_site_is_no_worker_of_this_one() -> None:
    rig = Rig()
    rig.beat("d1", 0.0)
    rig.beat(THERE, 0.0)
    assert rig.workers.serving(SERVED).decodes.ids == ["d1"]
    elsewhere = rig.workers.serving_elsewhere(SERVED)
    assert elsewhere is not None and elsewhere.decodes.ids == [THERE]
    rig.workers.lost("d1")
    assert rig.workers.has_worker(SERVED, ())
    assert not rig.workers.has_worker(SERVED, (), is_local=True)
    rig.workers.lost(THERE)
    assert rig.workers.serving_elsewhere(SERVED) is None
    assert not rig.workers.has_worker(SERVED, ())


def test_a_tenant_bound_to_regions_goes_to_sites_of_these_alone() -> None:
    rig = Rig()
    rig.beat(THERE, 0.0, region="eu")
    rig.beat("c/gw/00ff", 0.0)
    assert rig.workers.has_worker(SERVED, (), ["eu"])
    assert not rig.workers.has_worker(SERVED, (), ["us"])


def test_the_round_trip_of_a_site_counts() -> None:
    rig = Rig()
    rig.workers._round_trip_s = {"b/gw/00ff": 0.1, "c/gw/00ff": 0.3}.__getitem__
    for each in (THERE, "c/gw/00ff"):
        rig.beat(each, 0.0)
    assert rig.workers.speed("c/gw/00ff").step_s - rig.workers.speed(THERE).step_s == pytest.approx(
        0.2
    )


def test_the_workers_of_a_site_share_its_work() -> None:
    """A site of ten workers takes ten prompts in the time in which a worker takes one."""
    rig = Rig()
    load = WorkerLoad(
        step=1, step_budget_s=1.0, num_free_blocks=10_000, num_total_blocks=1000, num_engines=10
    )
    rig.beat(THERE, 0.0, load=load)
    elsewhere = rig.workers.serving_elsewhere(SERVED)
    assert elsewhere is not None
    for _ in range(10):
        rig.workers.assign(Target(THERE, (), 101, 1600), NEEDS, 0.0)
    limit_s = 1600 * rig.workers.speed(THERE).token_s
    assert elsewhere.decodes.busy_until[0] == pytest.approx(limit_s)
    assert elsewhere.decodes.free_tokens[0] == (10_000 - 10 * 101) * 16


# ── workers that do not answer ───────────────────────────────────────────────────────────────────


def silences(silent: SilentWorkers, *times: float) -> list[float | None]:
    """Starts that fail one after the other, each 0.1 s after it was sent."""
    return [silent.record("w", now - 0.1, now) for now in times]


def test_third_silent_start_in_a_row_closes_a_worker() -> None:
    silent = SilentWorkers()
    assert silences(silent, 0.0, 1.0, 2.0) == [None, None, FIRST_CLOSED_S]
    assert silent.closed(2.0 + FIRST_CLOSED_S - 0.01) == {"w"}
    assert silent.closed(2.0 + FIRST_CLOSED_S) == set()
    assert silent.silent() == {"w"}


def test_any_reply_opens_a_worker_and_starts_the_count_again() -> None:
    silent = SilentWorkers()
    silences(silent, 0.0, 1.0, 2.0)
    silent.forget("w")
    assert silent.closed(2.1) == silent.silent() == set()
    assert silences(silent, 3.0, 4.0) == [None, None]
    silent.forget("w")
    assert silences(silent, 5.0) == [None]


def test_each_further_silent_start_closes_it_for_twice_as_long() -> None:
    silent = SilentWorkers()
    assert silences(silent, 0.0, 1.0, 2.0, 5.0, 11.0, 22.0) == [None, None, 2.5, 5.0, 10.0, 10.0]


def test_starts_sent_together_count_once() -> None:
    silent = SilentWorkers()
    assert [silent.record("w", 0.0, 0.1 + 0.01 * n) for n in range(9)] == [None] * 9
    assert silent.closed(0.2) == set()
