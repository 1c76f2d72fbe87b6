from __future__ import annotations

from shared.sites.gateway_epochs import DOUBLED_S, MAX_GATEWAYS, GatewayEpochs, SiteSecrets


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


def test_two_sites_of_one_name_are_found_and_a_new_secret_is_none() -> None:
    secrets = SiteSecrets()
    assert not any(secrets.is_doubled("b", b"", float(tick)) for tick in range(3)), "it has none"
    assert not any(secrets.is_doubled("b", key, 3.0) for key in (b"old", b"old", b"new", b"new"))
    assert secrets.is_doubled("b", b"old", 4.0) and not secrets.is_doubled("c", b"old", 4.0)
    assert not secrets.is_doubled("b", b"old", 5.0), "it is the last one"
    assert not secrets.is_doubled("b", b"new", 5.0 + 2 * DOUBLED_S), "the other one has left"
