from __future__ import annotations

import pytest

from shared.transport.round_trips import (
    IN_USE_S,
    MAX_PEERS,
    MAX_WAIT_S,
    PROBE_INTERVAL_S,
    UNKNOWN_S,
    RoundTrips,
)


def measured(*samples_s: float) -> RoundTrips:
    round_trips = RoundTrips()
    for sample_s in samples_s:
        round_trips.record("p", sample_s, 0.0)
    return round_trips


def test_peer_without_a_measurement_is_waited_for_as_if_it_were_far() -> None:
    assert RoundTrips().wait_s("p", 0.1, 0.0) == pytest.approx(0.1 + UNKNOWN_S)


def test_estimate_is_that_of_rfc_6298() -> None:
    assert measured(0.1).estimate_s("p") == pytest.approx(0.1 + 4 * 0.05)
    # deviation 3/4 · 0.05 + 1/4 · |0.1 - 0.2|, mean 7/8 · 0.1 + 1/8 · 0.2
    assert measured(0.1, 0.2).estimate_s("p") == pytest.approx(0.1125 + 4 * 0.0625)


@pytest.mark.parametrize("round_trip_s", [0.0002, 0.12, 0.3])
def test_estimate_of_a_steady_peer_approaches_its_round_trip(round_trip_s: float) -> None:
    assert measured(*[round_trip_s] * 40).estimate_s("p") == pytest.approx(round_trip_s, rel=0.01)


def test_estimate_covers_a_peer_whose_round_trips_vary() -> None:
    """As of a group with a near and a far member."""
    round_trips = measured(*[0.001, 0.1] * 50)
    assert 0.1 < round_trips.estimate_s("p") < 0.4


def test_estimate_follows_a_change_of_route() -> None:
    assert measured(*[0.02] * 50, *[0.3] * 2).estimate_s("p") > 0.3
    assert measured(*[0.3] * 50, *[0.02] * 50).estimate_s("p") < 0.05


def test_no_wait_is_longer_than_the_limit() -> None:
    assert measured(*[0.4, 0.001] * 9).wait_s("p", 1.5, 0.0) == MAX_WAIT_S


def test_peer_that_hung_is_not_taken_for_a_far_one() -> None:
    """A reply may come after minutes from a process that was stopped."""
    assert measured(1000.0).estimate_s("p") == UNKNOWN_S
    known = measured(*[0.001] * 40)
    for _ in range(8):
        known.record("p", 1000.0, 0.0)
    assert known.estimate_s("p") < 1.4
    for _ in range(40):
        known.record("p", 0.001, 0.0)
    assert known.estimate_s("p") < 0.1


def test_only_peers_in_use_without_a_recent_measurement_are_probed() -> None:
    round_trips = RoundTrips()
    for peer in ("idle", "fresh", "stale"):
        round_trips.wait_s(peer, 0.1, 0.0)
        round_trips.record(peer, 0.1, 0.0)
    now = IN_USE_S + 1.0
    for peer in ("fresh", "stale"):
        round_trips.wait_s(peer, 0.1, now)
    round_trips.record("fresh", 0.1, now)
    assert round_trips.due_for_probe(now) == ["stale"]
    assert round_trips.due_for_probe(now + PROBE_INTERVAL_S - 0.1) == []
    assert sorted(round_trips.due_for_probe(now + PROBE_INTERVAL_S)) == ["fresh", "stale"]


def test_estimates_of_the_most_recently_used_peers_are_kept() -> None:
    round_trips = RoundTrips()
    for number in range(MAX_PEERS):
        round_trips.record(f"p{number}", 0.1, 0.0)
    round_trips.wait_s("p0", 0.1, 1.0)
    round_trips.record("new", 0.1, 1.0)
    assert round_trips.estimate_s("p0") == round_trips.estimate_s("new") == pytest.approx(0.3)
    assert round_trips.estimate_s("p1") == UNKNOWN_S


def test_processes_of_a_site_share_one_estimate_that_is_seldom_measured() -> None:
    trips = RoundTrips()
    for peer in ("b/gw.1/00ff", "b/gw.2/00ff", "c/gw/00ff", "b"):
        trips.use(peer, 0.0)
    assert trips.due_for_probe(0.0) == ["b/gw.2/00ff", "c/gw/00ff", "b"]
    trips.record("b/gw.2/00ff", 0.1, 0.1)
    assert trips.mean_s("b/gw.3/0001") == 0.1
    assert trips.measured_s("b") is None, "a process of this site"
    assert trips.due_for_probe(6.0) == ["c/gw/00ff", "b"], "which have not replied"
    assert "b/gw.2/00ff" in trips.due_for_probe(31.0)
