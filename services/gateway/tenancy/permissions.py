"""A tenant's permissions, independent of its usage."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.tenancy.errors import (
    ModelNotAllowed,
    NoRegionAllowed,
    PermissionDenied,
    ZeroRetentionRejected,
)
from shared.tenancy.tenant import TenantRecord


def may_use(tenant: TenantRecord, model: str) -> bool:
    return tenant.allowed_models is None or model in tenant.allowed_models


def check_model(tenant: TenantRecord, model: str) -> None:
    """Raises ModelNotAllowed for a model that the tenant may not use."""
    if not may_use(tenant, model):
        raise ModelNotAllowed(f"this tenant may not use the model {model!r}", param="model")


def check_regions(tenant: TenantRecord) -> None:
    """Raises NoRegionAllowed for an empty list, which would mean all regions on the wire."""
    if tenant.allowed_regions is not None and not tenant.allowed_regions:
        raise NoRegionAllowed("this tenant allows no region: no worker can serve its requests")


def may_store(tenant: TenantRecord, region: str) -> bool:
    """Returns whether a gateway of this region may store the tenant's text, and read it again. One
    without a region is in none.
    """
    regions = tenant.allowed_regions
    is_allowed = regions is None or (bool(region) and region in regions)
    return is_allowed and not tenant.is_zero_retention


# Returns the record that a tenant has by now, and None for a tenant that is not here any more.
Latest = Callable[[TenantRecord], TenantRecord | None]


# Called with a tenant's id, the feature that would store its text, and why it may not.
OnRefused = Callable[[str, str, PermissionDenied], None]


def ignore_refusal(tenant_id: str, what: str, error: PermissionDenied) -> None:
    """Takes a refusal that nobody records."""


def check_may_store(
    tenant: TenantRecord,
    region: str,
    what: str,
    *,
    param: str | None = None,
    on_refused: OnRefused = ignore_refusal,
) -> None:
    """Raises ZeroRetentionRejected or NoRegionAllowed if text may not be stored. `what` names the
    feature that would store it.
    """
    if may_store(tenant, region):
        return
    error: PermissionDenied
    if tenant.is_zero_retention:
        error = ZeroRetentionRejected(
            f"{what}: its text is stored; this tenant has zero retention", param=param
        )
    else:
        error = NoRegionAllowed(
            f"{what}: this gateway is in none of the tenant's regions", param=param
        )
    on_refused(tenant.tenant_id, what, error)
    raise error


def late_refusal(tenant_id: str, what: str, on_refused: OnRefused) -> PermissionDenied:
    """Returns the error of text that the tenant's record of now does not allow any more, after the
    request has begun.
    """
    error = PermissionDenied(f"{what}: its text is stored; this tenant no longer allows it")
    on_refused(tenant_id, what, error)
    return error


def priority_of(tenant: TenantRecord, requested: int | None) -> int:
    """Returns the priority; a higher one goes first. A request can lower its tenant's priority, not
    raise it.
    """
    return tenant.priority if requested is None else min(requested, tenant.priority)
