"""Sites whose prefills have failed."""

from __future__ import annotations

from services.decode.avoided_sites import FIRST_S, MAX_S, AvoidedSites


def test_pause_grows_with_each_failure_and_ends_with_a_success() -> None:
    sites, now, pauses = AvoidedSites(), 100.0, []
    for _ in range(12):
        sites.failed("b", now)
        sites.failed("b", now)  # of another handoff
        pause = next(each for each in range(1, 200) if not sites.is_avoided("b", now + each))
        pauses.append(pause)
        now += pause
    assert pauses[:4] == [FIRST_S, 4, 8, 16] and pauses[-1] == MAX_S
    assert not sites.is_avoided("c", now)
    sites.failed("b", now)
    sites.succeeded("b")
    assert not sites.is_avoided("b", now)
    sites.failed("b", now)
    assert not sites.is_avoided("b", now + FIRST_S)
