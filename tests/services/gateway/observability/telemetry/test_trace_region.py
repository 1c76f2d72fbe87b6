"""Spans of tenants that are bound to regions."""

from __future__ import annotations

import pytest

from services.gateway.observability.telemetry.telemetry import RequestTelemetry
from services.gateway.observability.telemetry.trace_context import TraceContext
from services.gateway.observability.telemetry.trace_region import TraceRegion
from shared.clock import MonotonicClock
from shared.regions.region_classes import region_classes
from shared.telemetry.timeline import Timeline
from shared.tenancy.refusals import Refusals
from shared.tenancy.tenant import TenantRecord


class RecordedTracing:
    """Records the tenants whose spans would be exported."""

    num_dropped = 0

    def __init__(self, *, is_sampled: bool = True) -> None:
        self.exported: list[str] = []
        self._context = TraceContext(b"t" * 16, b"s" * 8, is_sampled=is_sampled)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def begin(self, header: str | None) -> TraceContext:
        return self._context

    def ended(self, timeline: Timeline, *_: object) -> None:
        self.exported.append(timeline.tenant_id)


def exported(
    tenant: TenantRecord, refusals: Refusals, trace_region: str = "", *, is_sampled: bool = True
) -> list[str]:
    tracing = RecordedTracing(is_sampled=is_sampled)
    rule = TraceRegion(trace_region, refusals)
    telemetry = RequestTelemetry(
        "gateway-1", MonotonicClock(), lambda: 0.0, tracing, may_export=rule.may_export
    )
    record = telemetry.begin("r")
    telemetry.assign(record, tenant)
    telemetry.ended(record, "m", ())
    telemetry.closed(record, "m", ())
    timeline = telemetry.find("r")
    assert timeline is not None and timeline.tenant_id == tenant.tenant_id  # it is kept here
    return tracing.exported


FRENCH = TenantRecord(tenant_id="acme", allowed_regions=("fr",))


@pytest.mark.parametrize(
    ("tenant", "region", "is_exported"),
    [
        (TenantRecord(tenant_id="acme"), "us", True),
        (FRENCH, "", True),
        (FRENCH, "fr", True),
        (FRENCH, "us", False),
        (TenantRecord(tenant_id="acme", region_class="eu"), "de", True),
        (TenantRecord(tenant_id="acme", region_class="eu"), "us", False),
        (TenantRecord(tenant_id="acme", region_class="asia"), "", False),
    ],
)
def test_spans_stay_within_the_regions(
    tenant: TenantRecord, region: str, is_exported: bool
) -> None:
    refusals = Refusals("fr", region_classes(["eu=fr,de"]))
    assert exported(tenant, refusals, region) == (["acme"] if is_exported else [])
    assert refusals.totals == ({} if is_exported else {"trace": 1})


def test_what_is_not_sampled_is_not_refused() -> None:
    refusals = Refusals("fr")
    assert exported(FRENCH, refusals, "us", is_sampled=False) == []
    assert not refusals.totals


def test_a_gateway_without_a_region_exports_no_bound_tenant() -> None:
    assert exported(FRENCH, Refusals("")) == []
