"""Refusals by residency: their counts, in heartbeats and as a metric."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from shared.errors import OutsideRegions
from shared.messages import MAX_REFUSALS, Heartbeat, ResidencyRefusals
from shared.metrics.families.fleet import FleetCollector
from shared.metrics.families.member import Member
from shared.tenancy.refusals import RefusalIncreases, Refusals


def heartbeat(refusals: Refusals, epoch: int = 1) -> Heartbeat:
    return Heartbeat(
        process_id="decode-1",
        epoch=epoch,
        sequence_number=1,
        roles=("decode",),
        state="ready",
        interval_s=0.25,
        refusals=refusals.last(),
        num_refusals=tuple(refusals.totals.items()),
    )


def test_a_region_of_the_tenant_passes() -> None:
    refusals = Refusals("fr")
    refusals.check("decode", "acme", ("fr", "de"))
    refusals.check("decode", "acme", None)
    refusals.check("kv_push", "acme", ("de",), "de")
    assert not refusals.totals


@pytest.mark.parametrize(("own", "region"), [("us", None), ("", None), ("fr", "us"), ("fr", "")])
def test_another_region_is_refused_and_counted(own: str, region: str | None) -> None:
    refusals = Refusals(own)
    with pytest.raises(OutsideRegions, match="is none of those"):
        refusals.check("decode", "acme", ("fr",), region)
    with pytest.raises(OutsideRegions):
        refusals.check("decode", "other", (), region)
    wanted = own if region is None else region
    assert refusals.last()[0] == ResidencyRefusals("decode", "acme", wanted, 1)


def test_the_last_kinds_and_all_totals_are_reported() -> None:
    refusals = Refusals("us")
    for number in range(2 * MAX_REFUSALS):
        refusals.count("prefill", f"tenant-{number}", "us")
    refusals.count("prefill", "tenant-0", "us")
    last = refusals.last()
    assert len(last) == MAX_REFUSALS
    assert last[-1] == ResidencyRefusals("prefill", "tenant-0", "us", 2)
    assert refusals.totals == {"prefill": 2 * MAX_REFUSALS + 1}


def test_increases_between_heartbeats() -> None:
    refusals, increases = Refusals("us"), RefusalIncreases()
    refusals.count("decode", "acme", "us")
    assert increases.take(heartbeat(refusals)) == [ResidencyRefusals("decode", "acme", "us", 1)]
    assert increases.take(heartbeat(refusals)) == []
    refusals.count("decode", "acme", "us")
    refusals.count("pin", "acme", "us")
    assert increases.take(heartbeat(refusals)) == [
        ResidencyRefusals("decode", "acme", "us", 1),
        ResidencyRefusals("pin", "acme", "us", 1),
    ]
    restarted = Refusals("us")
    restarted.count("decode", "acme", "us")
    assert increases.take(heartbeat(restarted, epoch=2)) == [
        ResidencyRefusals("decode", "acme", "us", 1)
    ]


def test_the_metric_counts_by_check() -> None:
    refusals = Refusals("us")
    refusals.count("decode", "acme", "us")
    refusals.count("decode", "other", "us")
    registry = CollectorRegistry()
    registry.register(FleetCollector(lambda: [Member(heartbeat(refusals))]))
    text = generate_latest(registry).decode()
    assert 'hearth_residency_refusals_total{check="decode",process="decode-1"} 2.0' in text
