from __future__ import annotations

from itertools import pairwise

from shared.sites.gateway_epochs import (
    DOUBLED_S,
    INSTANCE_BYTES,
    MAX_GATEWAYS,
    GatewayEpochs,
    SiteInstances,
    site_instance,
)


def test_two_gateways_of_one_name_are_found_and_a_restarted_one_is_not() -> None:
    epochs = GatewayEpochs()
    assert not any(epochs.is_doubled("b/gw", epoch, epoch) for epoch in range(8)), "it restarts"
    states = [epochs.is_doubled("b/gw", 10 + tick % 2, 10.0 + tick / 2) for tick in range(20)]
    assert states == [False] * 2 + [True] * 18
    assert epochs.is_doubled("b/gw", 10, 20.0)
    assert not epochs.is_doubled("b/gw", 10, 20.0 + DOUBLED_S), "the other one has left"
    for number in range(MAX_GATEWAYS + 1):
        epochs.is_doubled(f"b/gw.{number}", 1, 30.0)
    assert len(epochs._known) == MAX_GATEWAYS


def test_two_sites_of_one_name_are_found_and_a_new_server_is_none() -> None:
    sites = SiteInstances()
    first, second = site_instance((), "nats-1"), site_instance((), "nats-2")
    assert site_instance((b"key",), "nats-1") != first == site_instance((), "nats-1")
    assert not any(sites.is_doubled("b", b"", float(tick)) for tick in range(3)), "an older release"
    assert not any(sites.is_doubled("b", each, 3.0) for each in (first, first, second, second))
    assert sites.doubled(3.0) == ()
    assert sites.is_doubled("b", first, 4.0) and not sites.is_doubled("c", first, 4.0)
    assert sites.doubled(4.0) == ("b",)
    assert sites.is_doubled("b", first, 5.0), "the other one may still be there"
    assert not sites.is_doubled("b", first, 4.0 + DOUBLED_S), "it has left"
    assert sites.doubled(4.0 + DOUBLED_S) == ()


def test_a_secret_that_is_replaced_makes_no_second_site() -> None:
    """Gateways read each step of a rotation at other times."""
    sites, steps = SiteInstances(), ((b"old",), (b"old", b"new"), (b"new", b"old"), (b"new",))
    for now, (before, after) in enumerate(pairwise(steps)):
        for keys in (before, after, before, after, after):
            assert not sites.is_doubled("b", site_instance(keys, "nats"), float(now))
    assert len(site_instance((b"1", b"2", b"3"), "nats")) == 2 * INSTANCE_BYTES, "of a message"
    for keys in ((b"new",), (b"another",), (b"new",)):
        is_doubled = sites.is_doubled("b", site_instance(keys, "nats"), 4.0)
    assert is_doubled
