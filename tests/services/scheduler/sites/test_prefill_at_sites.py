"""Prompts that another site computes: which ones, and what its link carries meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from services.scheduler.fleet import WorkerFleet
from services.scheduler.placement import LocalPrefill, RequestSize, Target, place
from services.scheduler.sites.link_budgets import (
    LOWER_SHARE,
    MAX_DOUBLINGS,
    START_BYTES_PER_S,
    LinkBudgets,
    LinkRate,
)
from shared.lifecycle.health import Fleet
from shared.messages import Heartbeat, SitePushes, WorkerLoad, WorkerRole
from shared.sites.kv_targets import KV_FROM_SITES
from tests.support.records import model_card
from tests.support.world.randomness import SeededRandomness

SERVED = ("m", "r1", 16)
TOKEN_BYTES = 100_000
CARD = model_card(
    kv_format="bf16/b16",
    max_context_tokens=1_000_000,
    kv_bytes_per_token=TOKEN_BYTES,
    features=(KV_FROM_SITES,),
)
THERE, ROUND_TRIP_S = "b/gw/01", 0.02
GIGABIT = 125e6  # bytes per second: 0.8 ms a token
FAST = 100 * GIGABIT  # 8 us a token
NOW = 10.0


class Rig:
    """A decode worker here, which computes a token in 1 ms, and prefill workers of sites."""

    def __init__(self, bytes_per_s: float, *, site_token_s: float = 1e-4) -> None:
        self.health = Fleet("scheduler-0")
        self.site_token_s = site_token_s
        self.number = 0
        self.workers = WorkerFleet(
            self.health, lambda worker_id: ROUND_TRIP_S, LinkBudgets(bytes_per_s)
        )
        self.beat("d1", ("decode",), token_s=1e-3)
        self.beat(THERE, ("prefill",), token_s=site_token_s)

    def beat(
        self,
        worker_id: str,
        roles: tuple[WorkerRole, ...],
        *,
        token_s: float = 1e-4,
        now: float = NOW,
        **changes: object,
    ) -> None:
        """Heartbeats of a worker that computed 10,000 tokens between each two."""
        load = WorkerLoad(
            step=1, step_budget_s=1.0, num_free_blocks=100_000, num_total_blocks=100_000
        )
        load = msgspec.structs.replace(load, **changes)
        for step in range(20):
            self.number += 1
            worked = {"num_busy_steps": step, "num_computed_prompt_tokens": step * 10_000}
            each = msgspec.structs.replace(load, busy_s=step * 1e4 * token_s, **worked)
            heartbeat = Heartbeat(
                process_id=worker_id,
                epoch=1,
                sequence_number=self.number,
                roles=roles,
                state="ready",
                interval_s=0.25,
                load=each,
                model=CARD,
            )
            self.health.observe(heartbeat, now)
            self.workers.on_heartbeat(heartbeat, now)

    def target(self, num_tokens: int, now: float = NOW, **needed: bool) -> Target:
        found = self.found(num_tokens, now, **needed)
        assert found is not None
        return found

    def found(self, num_tokens: int, now: float = NOW, **needed: bool) -> Target | None:
        needs = RequestSize(num_prompt_tokens=num_tokens, num_tokens=num_tokens, **needed)
        return place(
            needs,
            self.workers.serving(SERVED),
            {},
            local_prefill=LocalPrefill(4, 1_000_000),
            now=now,
            random_below=SeededRandomness(0).below,
        )

    def assign(self, num_tokens: int) -> tuple[str, ...]:
        """Returns the prefill workers that were chosen."""
        target = self.target(num_tokens)
        needs = RequestSize(num_prompt_tokens=num_tokens, num_tokens=num_tokens)
        self.workers.assign(target, needs, NOW)
        return target.prefill_candidates


@pytest.mark.parametrize(
    ("num_tokens", "bytes_per_s", "is_away"),
    [
        (20, FAST, False),  # 20 ms here, and as much for the round trip
        (2000, FAST, True),  # 2 s here, 0.2 s there
        (2000, GIGABIT / 2, False),  # 3.2 s over this link
        (2000, GIGABIT * 2, True),  # 0.8 s
    ],
)
def test_long_prompt_goes_where_its_kv_is_here_sooner(
    num_tokens: int, bytes_per_s: float, is_away: bool
) -> None:
    target = Rig(bytes_per_s).target(num_tokens)
    assert (target.decode_id, target.prefill_candidates) == ("d1", (THERE,) if is_away else ())
    assert target.num_pushed_tokens == (num_tokens - 1 if is_away else 0)


def test_worker_at_home_is_the_fallback_and_a_site_is_tried_once() -> None:
    rig = Rig(FAST)
    rig.beat("p1", ("prefill",), token_s=5e-4)
    for number in range(2, 6):
        rig.beat(f"b/gw{number}/01", ("prefill",))
    first, *others = rig.target(2000).prefill_candidates
    assert (first.partition("/")[0], others) == ("b", ["p1"])


def test_pushes_share_the_link() -> None:
    """Each takes 0.8 s of the link, and here 2 s, plus a tenth for each request that it delays."""
    rig = Rig(GIGABIT * 2, site_token_s=1e-6)
    rig.beat("b/other/01", ("prefill",), token_s=1e-6)  # behind the same link
    chosen = [rig.assign(2000) for _ in range(4)]
    assert [bool(each) for each in chosen] == [True, True, True, False]
    later = rig.target(2000, NOW + 2.4).prefill_candidates
    assert later, "the link has sent what was assigned"


def test_rejected_request_gives_its_share_of_the_link_back() -> None:
    rig = Rig(GIGABIT * 2, site_token_s=1e-6)
    needs = RequestSize(num_prompt_tokens=2000, num_tokens=2000)
    for _ in range(5):
        target = rig.target(2000)
        assert target.prefill_candidates == (THERE,)
        rig.workers.release(rig.workers.assign(target, needs, NOW), NOW)


def test_queue_of_a_site_is_shared_by_its_engines() -> None:
    """2,000 tokens take 1 s there, and 2 s here."""
    few, many = (Rig(FAST, site_token_s=5e-4) for _ in range(2))
    many.beat(THERE, ("prefill",), token_s=5e-4, num_engines=8)
    assert [bool(few.assign(2000)) for _ in range(3)] == [True, True, False]
    assert all(many.assign(2000) for _ in range(4))


def test_workers_at_home_and_a_site_share_a_burst() -> None:
    """10,000 tokens take 1 s. A site with 2 s of work gets no more: else it would get all."""
    rig = Rig(FAST)
    rig.beat("p1", ("prefill",), token_s=1e-4)
    assert [rig.assign(10_000)[0] for _ in range(4)] == ["p1", THERE, THERE, THERE]
    assert rig.found(10_000) is None, "it waits here"
    assert rig.target(10_000, NOW + 0.92).prefill_candidates[0] == "p1"


def test_decode_worker_of_an_older_release_gets_no_prefill_worker_of_a_site() -> None:
    rig = Rig(FAST)
    old = msgspec.structs.replace(CARD, features=())
    heartbeat = rig.health.heartbeat_of("d1")
    assert heartbeat is not None
    changed = msgspec.structs.replace(heartbeat, process_id="d2", model=old)
    rig.health.observe(changed, NOW)
    rig.workers.on_heartbeat(changed, NOW)
    rig.beat(THERE, ("prefill",))
    assert rig.target(2000).prefill_candidates == ()
    rig.workers.lost("d2")
    rig.beat(THERE, ("prefill",))
    assert rig.target(2000).prefill_candidates == (THERE,)


def test_request_of_another_site_is_computed_here() -> None:
    """Else a site would reach one that it has no link to."""
    rig = Rig(FAST)
    assert rig.target(2000, is_from_site=True).prefill_candidates == ()
    rig.beat("p1", ("prefill",))
    assert rig.target(2000, is_from_site=True).prefill_candidates == ("p1",)


def test_rate_of_a_link_is_learned_from_what_decode_workers_received() -> None:
    rig = Rig(FAST)
    slow = SitePushes("b", num_tokens=1000, num_bytes=1000 * TOKEN_BYTES, link_s=100.0)
    for number in range(1, 40):
        pushed = SitePushes(
            "b",
            num_tokens=slow.num_tokens * number,
            num_bytes=slow.num_bytes * number,
            link_s=slow.link_s * number,
        )
        rig.beat("d1", ("decode",), token_s=1e-3, site_pushes=(pushed,))
    rig.beat(THERE, ("prefill",))
    assert rig.target(2000).prefill_candidates == ()


def test_bytes_of_a_token_are_those_that_were_pushed() -> None:
    """A model whose layers see only their last keys pushes less than its card says."""
    links = LinkBudgets(GIGABIT)
    pushed = SitePushes("b", num_tokens=10**6, num_bytes=10**6 * TOKEN_BYTES // 10, link_s=80.0)
    load = WorkerLoad(step=1, step_budget_s=1.0, site_pushes=(pushed,))
    before = links.push_token_s("b", SERVED, CARD, NOW)
    links.observe("d1", load, CARD, NOW)
    links.observe("d1", load, CARD, NOW)
    assert links.push_token_s("b", SERVED, CARD, NOW) == pytest.approx(before / 10, rel=0.02)
    restarted = msgspec.structs.replace(load, site_pushes=(SitePushes("b", num_bytes=1),))
    links.observe("d1", restarted, CARD, NOW)
    assert links.bytes_per_s("b", NOW) == GIGABIT


def test_rate_rises_at_once_falls_slowly_and_is_tried_again() -> None:
    rate = LinkRate(NOW)
    rate.add(100, 1.0, NOW)
    assert rate.estimate(NOW) == START_BYTES_PER_S, "too few bytes"
    rate.add(1e9, 0.1, NOW)
    assert rate.estimate(NOW) == 1e10
    rate.add(1e9, 1.0, NOW)
    assert rate.estimate(NOW) == pytest.approx(1e10 - LOWER_SHARE * 9e9)
    lowest = rate.estimate(NOW)
    assert rate.estimate(NOW + 60) == 2 * lowest
    assert rate.estimate(NOW + 1e9) == 2**MAX_DOUBLINGS * lowest
