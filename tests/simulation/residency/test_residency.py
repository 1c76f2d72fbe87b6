"""A small run of six sites: nothing of a tenant lies where it may not, and the search would see it.

`python -m tests.simulation.residency` runs as many requests as wanted.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from services.scheduler.worker_table import WorkerTable
from tests.simulation.residency.borders import WITHDRAWN_S, Borders, Place
from tests.simulation.residency.drawing import residency_plan_of
from tests.simulation.residency.plan import Limits, ResidencyPlan, all_tenants
from tests.simulation.residency.simulation import run_residency
from tests.support.canaries.search import Sighting


def _plan(seed: int, num_requests: int) -> ResidencyPlan:
    return replace(residency_plan_of(seed, num_requests), changes=())


def test_nothing_of_a_tenant_crosses_its_borders() -> None:
    outcome = run_residency(_plan(0, 400))
    assert outcome.leaks == {}, sorted(outcome.examples)
    assert outcome.not_found == {}
    assert outcome.wrongs == {}
    assert outcome.endings["finished"] > 250
    assert outcome.num_crossed > 20
    assert min(outcome.num_seen[each] for each in ("subject", "Redis", "frame", "memory")) > 100


def test_a_scheduler_that_ignores_regions_is_found() -> None:
    def everywhere(self: WorkerTable, regions: object) -> np.ndarray:
        return np.ones(len(self), dtype=np.bool_)

    with patch.object(WorkerTable, "in_regions", everywhere):
        outcome = run_residency(_plan(0, 100))
    found = {each.partition(":")[0] for each in outcome.leaks}
    assert found >= {"subject", "frame", "memory"}


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
