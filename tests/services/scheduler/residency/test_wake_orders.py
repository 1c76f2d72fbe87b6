from __future__ import annotations

from math import inf

import pytest

from services.scheduler.residency.arrival_rates import MAX_MODELS, WINDOW_S, ArrivalRates
from services.scheduler.residency.view import ModelDemand
from services.scheduler.residency.wake_orders import AVOIDED_S, PATIENCE, REFUSED_S, SLACK_S, Orders

MODEL = ("m", "r1")
KEY, OTHER = ("host-0", MODEL), ("host-1", MODEL)


def test_wake_counts_until_its_time_is_up_and_its_host_is_avoided_then() -> None:
    orders, limit_s = Orders(), PATIENCE * 0.5 + SLACK_S
    orders.wake_asked(KEY, 0.5, 10.0)
    assert orders.ready_at(MODEL) == 10.5
    orders.expire(10.0 + limit_s)
    assert orders.wake_of(KEY) is not None and not orders.is_avoided(KEY, 10.0 + limit_s)
    orders.expire(10.1 + limit_s)
    assert orders.wake_of(KEY) is None and orders.is_avoided(KEY, 10.1 + limit_s)
    assert orders.ready_at(MODEL) == inf
    assert not orders.is_avoided(KEY, 10.2 + limit_s + AVOIDED_S)


def test_reply_of_the_host_replaces_the_expectation() -> None:
    orders = Orders()
    orders.wake_asked(KEY, 0.5, 10.0)
    orders.accepted(KEY, 4.0, 10.0)
    assert orders.ready_at(MODEL) == 14.0
    orders.wake_asked(OTHER, 1.0, 10.0)
    assert orders.ready_at(MODEL) == 11.0
    orders.hot(OTHER)
    assert orders.ready_at(MODEL) == 14.0


def test_time_for_parking_others_does_not_count_as_time_of_the_wake() -> None:
    orders = Orders()
    orders.wake_planned(KEY, 0.5, 30.0, 10.0)
    orders.expire(40.0)
    assert orders.wake_of(KEY) is not None
    orders.wake_asked(KEY, 0.5, 40.0)
    orders.expire(44.0)
    assert orders.wake_of(KEY) is None


def test_refusal_is_known_only_if_all_hosts_refuse() -> None:
    orders, hosts = Orders(), frozenset({"host-0", "host-1"})
    orders.refused(KEY, "full", 3.0, 10.0)
    assert orders.refusal(MODEL, hosts) is None and orders.is_refused(KEY)
    orders.refused(OTHER, "no memory", None, 10.0)
    refusal = orders.refusal(MODEL, hosts)
    assert refusal is not None and (refusal.message, refusal.until) == ("full", 13.0)
    orders.expire(13.0)
    assert not orders.is_refused(KEY) and orders.refusal(MODEL, hosts) is None
    orders.expire(10.0 + REFUSED_S)
    assert not orders.is_refused(OTHER)


def test_nothing_that_a_lost_host_was_asked_for_counts() -> None:
    orders = Orders()
    orders.wake_asked(KEY, 0.5, 10.0)
    orders.park_asked(KEY, 30.0, 10.0)
    orders.wake_asked(OTHER, 0.5, 10.0)
    orders.lost("host-0")
    assert orders.wake_of(KEY) is None and not orders.is_parking(KEY)
    assert orders.wake_of(OTHER) is not None


def test_rate_of_a_steady_model_is_its_arrivals_per_second_and_decays() -> None:
    rates = ArrivalRates()
    for number in range(2000):
        rates.record(MODEL, number / 2)
    assert rates.rate(MODEL, 1000.0) == pytest.approx(2.0, rel=0.01)
    assert rates.rate(MODEL, 1000.0 + 2 * WINDOW_S) == pytest.approx(2.0 / 7.39, rel=0.01)
    assert rates.rate(("other", "r1"), 0.0) == 0.0


def test_least_recent_model_is_forgotten_beyond_the_limit() -> None:
    rates = ArrivalRates()
    for number in range(MAX_MODELS + 1):
        rates.record((f"m{number}", "r1"), float(number))
    assert len(rates.models()) == MAX_MODELS
    assert rates.last_used_at(("m0", "r1")) == -inf


def test_expected_rate_falls_once_a_model_is_idle_for_unusually_long() -> None:
    demand = ModelDemand(rate=2.0, last_used_at=100.0)
    assert demand.expected_rate(101.0) == 2.0
    assert demand.expected_rate(130.0) == pytest.approx(0.1)
