"""Requests that wait for a home site, in virtual time."""

from __future__ import annotations

import asyncio

from services.gateway.tenancy.site_leases import SiteLeases
from shared.messages import MAX_ASKED, LeaseState, LeaseStep
from shared.store import StoreUnavailable
from shared.tenancy.tenant import TenantRecord
from tests.support.world.clock import VirtualClock, run

TENANT = TenantRecord(tenant_id="a/team", sites=("b",), requests_per_min=1_000)


def test_unexpected_error_of_a_step_answers_all_that_wait() -> None:
    async def fail(tenant_id: str, step: LeaseStep) -> LeaseState:
        raise RuntimeError("not foreseen")

    async def admit_more_than_a_step_asks() -> list[object]:
        leases = SiteLeases(VirtualClock(), fail)
        costs = {"requests_per_min": 1, "concurrency": 1}
        asked = (leases.admit(TENANT, f"request-{n}", costs) for n in range(MAX_ASKED + 1))
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = run(admit_more_than_a_step_asks(), limit_s=60)
    assert {type(each) for each in answers} == {StoreUnavailable}
