"""Which tenants a gateway serves, by its region."""

from __future__ import annotations

import pytest

from services.gateway.tenancy.errors import NoRegionAllowed
from services.gateway.tenancy.region_rule import RegionRule
from shared.regions.region_classes import region_classes
from shared.tenancy.refusals import Refusals
from shared.tenancy.tenant import TenantRecord

CLASSES = region_classes(["eu=fr,de"])


def tenant(region_class: str = "", regions: tuple[str, ...] | None = None) -> TenantRecord:
    return TenantRecord(tenant_id="t", region_class=region_class, allowed_regions=regions)


def test_record_gets_the_regions_of_its_class() -> None:
    rule = RegionRule("fr", CLASSES)
    assert rule.admitted(tenant()) == tenant()
    assert rule.admitted(tenant("", ("us", "fr"))) == tenant("", ("us", "fr"))
    assert rule.admitted(tenant("eu")) == tenant("eu", ("de", "fr"))
    assert rule.admitted(tenant("eu", ("us", "fr"))) == tenant("eu", ("fr",))
    assert rule.admitted(tenant("", ("fr", "de"))) == tenant("eu", ("de", "fr")), (
        "nats-server knows"
    )


def test_linked_site_serves_bound_tenants_of_a_class_alone() -> None:
    """No nats-server would hold data of others back that a process sends over a link."""
    refusals = Refusals("fr", CLASSES)
    rule = RegionRule("fr", CLASSES, refusals, is_linked=True)
    for each in (tenant(), tenant("eu"), tenant("eu", ("fr",)), tenant("", ("de", "fr"))):
        assert rule.admitted(each).region_class == ("eu" if each != tenant() else "")
    assert not refusals.totals
    for regions in (("fr",), ("fr", "us"), ("fr", "de", "us")):
        with pytest.raises(NoRegionAllowed, match=r"declare a class \(--class NAME=[a-z,]+\)"):
            rule.admitted(tenant("", regions))
    assert refusals.totals == {"gateway": 3}


@pytest.mark.parametrize(
    ("region", "refused"),
    [
        ("", tenant("eu")),
        ("us", tenant("eu")),
        ("us", tenant("", ("fr",))),
        ("fr", tenant("eu", ("de",))),
        ("fr", tenant("", ())),
        ("fr", tenant("world")),
    ],
)
def test_gateway_elsewhere_refuses_and_counts(region: str, refused: TenantRecord) -> None:
    refusals = Refusals(region)
    rule = RegionRule(region, CLASSES, refusals)
    with pytest.raises(NoRegionAllowed) as raised:
        rule.admitted(refused)
    assert "\n" not in raised.value.message
    assert refusals.totals == {"gateway": 1}
