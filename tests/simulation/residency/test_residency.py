"""A small run of six sites: nothing of a tenant lies where it may not, and the search would see it.

`python -m tests.simulation.residency` runs as many requests as wanted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from services.gateway.tenancy.region_rule import RegionRule
from services.scheduler.worker_table import WorkerTable
from shared.tenancy.refusals import Refusals
from tests.simulation.residency.borders import WITHDRAWN_S, Borders, Place
from tests.simulation.residency.drawing import residency_plan_of
from tests.simulation.residency.plan import CLASSES, Limits, ResidencyPlan, all_tenants
from tests.simulation.residency.simulation import run_residency
from tests.support.canaries.search import Sighting
from tests.support.grids import in_short_run


def test_nothing_of_a_tenant_crosses_its_borders() -> None:
    outcome = run_residency(residency_plan_of(0, 400))
    assert outcome.leaks == {}, sorted(outcome.examples)
    assert outcome.not_found == {}
    assert outcome.wrongs == {}
    assert outcome.endings["finished"] > 250
    assert outcome.num_crossed > 20
    assert outcome.num_of_classes > 5
    assert min(outcome.num_seen[each] for each in ("subject", "Redis", "frame", "memory")) > 100


def _bound_by_class(plan: ResidencyPlan) -> ResidencyPlan:
    """Tenants with a class may be in all of it, those with allowed regions have those of one."""
    tenants = {
        name: replace(each, limits=_of_class(each.limits)) for name, each in plan.tenants.items()
    }
    assert {None, ("de", "fr")} <= {each.limits.allowed_regions for each in tenants.values()}
    return replace(plan, tenants=tenants, changes=())


def _of_class(limits: Limits) -> Limits:
    allowed = limits.allowed_regions or ()
    is_bound = bool(limits.region_class) or not CLASSES.of_exactly(allowed)
    return Limits(limits.region_class) if is_bound else limits


@pytest.mark.parametrize("kind", in_short_run(["scheduler"], ["gateway", "scheduler"]))
def test_without_the_checks_of_one_kind_of_process_others_refuse(kind: str) -> None:
    """Of the others what they refuse is never sent to them here: see `tests/services/worker`."""
    right, everywhere = Refusals.check, np.ones
    patched = {
        "gateway": (RegionRule, "refused", lambda self, tenant: ""),
        "scheduler": (WorkerTable, "in_regions", lambda self, _: everywhere(len(self), bool)),
    }

    def check(self: Refusals, name: str, *arguments: Any) -> None:
        if name != kind:
            right(self, name, *arguments)  # type: ignore[arg-type]

    with patch.object(Refusals, "check", check), patch.object(*patched[kind]):
        outcome = run_residency(_bound_by_class(residency_plan_of(0, 200)))
    assert outcome.leaks == {}, sorted(outcome.examples)
    assert outcome.events["residency_refused"] > 0


@pytest.mark.parametrize(
    ("at_s", "regions", "expected"),
    [
        (9.0, {"fr", "de"}, None),
        (9.0, {"fr", "us"}, "us"),
        (10.0 + WITHDRAWN_S, {"de"}, None),
        (10.1 + WITHDRAWN_S, {"de"}, "de"),
        (99.0, {"fr"}, None),
        (99.0, None, "any region"),
    ],
)
def test_a_change_of_regions_takes_effect_soon(
    at_s: float, regions: set[str] | None, expected: str | None
) -> None:
    tenant = replace(next(iter(all_tenants().values())), limits=Limits("eu"))
    borders = Borders()
    borders.begin([tenant])
    borders.change(tenant.tenant_id, Limits("eu", ("fr",)), 10.0)
    place = Place("subject", "s", None if regions is None else frozenset(regions), at_s)
    assert borders.forbidden(tenant.tenant_id, place) == expected
    borders.judge([(place, Sighting(tenant.tenant_id, "text", 0))])
    assert borders.leaks.total() == (expected is not None)


@pytest.mark.parametrize(
    ("later", "names"),
    [
        (Limits(), {"", "eu", "treaty", "asia", "only-fr"}),
        (Limits("only-fr"), {"only-fr"}),
        (Limits("eu", ("fr",)), {"eu", "only-fr"}),
    ],
    ids=["anywhere", "one region", "a part of its class"],
)
def test_a_digest_is_read_where_its_prompts_may_be(later: Limits, names: set[str]) -> None:
    """And by all of a tenant's own class."""
    tenant = replace(next(iter(all_tenants().values())), limits=Limits("", ("fr", "de")))
    borders = Borders()
    borders.begin([tenant])
    borders.change(tenant.tenant_id, later, 10.0)
    named = {
        at_s: {
            each
            for each in ("", "eu", "treaty", "asia", "only-fr")
            if borders.may_name(tenant.tenant_id, each, at_s)
        }
        for at_s in (9.0, 11.0, 10.1 + WITHDRAWN_S)
    }
    before = {"eu", "only-fr"}
    assert named == {9.0: before, 11.0: before | names, 10.1 + WITHDRAWN_S: names}


def test_zero_retention_leaves_nothing_at_home_either() -> None:
    quiet = replace(next(iter(all_tenants().values())), limits=Limits(), is_zero_retention=True)
    other = replace(quiet, tenant_id="other", is_zero_retention=False)
    borders, found = Borders(), list[tuple[bool, str]]()
    borders.begin([quiet, other])
    for borders.is_over in (False, True):
        for kind in ("subject", "frame", "memory", "Redis"):
            place = Place(kind, "s", frozenset({"fr"}), 1.0)
            if borders.forbidden(quiet.tenant_id, place):
                found.append((borders.is_over, kind))
            assert not borders.forbidden(other.tenant_id, place)
    assert found == [(False, "Redis"), (True, "memory"), (True, "Redis")]
