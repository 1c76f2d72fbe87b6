"""Which regions may hold data of a tenant."""

from __future__ import annotations

import msgspec
import pytest

from shared.errors import ConfigError, OutsideRegions
from shared.regions.region_classes import MAX_CLASSES, NO_CLASSES, RegionClasses, region_classes
from shared.tenancy.residency import may_hold, reason_against, regions_of, within_class
from shared.tenancy.tenant import TenantRecord
from tests.services.scheduler.literals import submit_of

CLASSES = region_classes(["eu=fr,de", "world=fr,us", "solo=us"])


def tenant(region_class: str = "", regions: tuple[str, ...] | None = None) -> TenantRecord:
    return TenantRecord(tenant_id="t", region_class=region_class, allowed_regions=regions)


@pytest.mark.parametrize(
    ("region_class", "regions", "expected"),
    [
        ("", None, None),
        ("", ("fr",), {"fr"}),
        ("", (), set()),
        ("", ("",), set()),
        ("eu", None, {"fr", "de"}),
        ("eu", ("fr", "us"), {"fr"}),
        ("eu", ("us",), set()),
        ("eu", (), set()),
        ("mars", None, set()),
        ("mars", ("fr",), set()),
    ],
)
def test_class_and_regions_hold_together(
    region_class: str, regions: tuple[str, ...] | None, expected: set[str] | None
) -> None:
    record = tenant(region_class, regions)
    assert regions_of(record, CLASSES) == expected
    for region in ("", "fr", "de", "us"):
        may = may_hold(record, region, CLASSES)
        assert may == (expected is None or region in expected)
        assert bool(reason_against(record, region, CLASSES)) is not may


def test_request_without_regions_is_open_to_all() -> None:
    plain = submit_of("r").request
    assert regions_of(plain, CLASSES) is None and may_hold(plain, "", CLASSES)
    classed = msgspec.structs.replace(plain, region_class="eu")
    assert not may_hold(classed, "us", CLASSES) and not may_hold(classed, "", CLASSES)
    assert may_hold(classed, "de", CLASSES) and not may_hold(classed, "de", NO_CLASSES)
    both = msgspec.structs.replace(classed, allowed_regions=("fr",))
    assert may_hold(both, "fr", CLASSES) and not may_hold(both, "de", CLASSES)


def test_request_is_placed_within_the_regions_of_its_class() -> None:
    plain = submit_of("r", allowed_regions=("us",)).request
    assert within_class(plain, CLASSES) is plain
    classed = msgspec.structs.replace(plain, region_class="world")
    assert within_class(classed, CLASSES).allowed_regions == ("us",)
    free = msgspec.structs.replace(classed, allowed_regions=())
    assert within_class(free, CLASSES).allowed_regions == ("fr", "us")
    for lost in (msgspec.structs.replace(classed, region_class=name) for name in ("eu", "mars")):
        with pytest.raises(OutsideRegions):  # no region stands for all of them on the wire
            within_class(lost, CLASSES)


def test_reason_names_what_is_wrong() -> None:
    assert "'mars'" in reason_against(tenant("mars"), "fr", CLASSES)
    assert reason_against(tenant("eu"), "us", CLASSES) == (
        "this process is in the region 'us'; data of this tenant may be in de, fr alone"
    )
    assert "in no region" in reason_against(tenant("eu"), "", CLASSES)


def test_classes_are_read_and_written() -> None:
    assert CLASSES.with_region("fr") == ("eu", "world")
    assert CLASSES.with_region("") == () and CLASSES.with_region("mars") == ()
    assert region_classes(CLASSES.texts()) == CLASSES
    assert region_classes([]) == RegionClasses()


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["eu"], "'eu' is not"),
        (["eu="], "'eu=' is not"),
        (["=fr"], "'=fr' is not"),
        (["eu=fr,,de"], "is not"),
        (["e.u=fr"], "is not"),
        (["eu=f r"], "is not"),
        (["eu=*"], "is not"),
        (["eu=fr", "eu=de"], "'eu' is declared twice"),
        (["eu=fr,fr"], "names a region twice"),
        ([f"c{n}=fr" for n in range(MAX_CLASSES + 1)], "16 at most"),
    ],
)
def test_invalid_classes_have_one_line(texts: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        region_classes(texts)
    assert problem in raised.value.message and "\n" not in raised.value.message
