"""What a tenant may ask for at all, whatever it has used."""

from __future__ import annotations

from services.gateway.tenancy.errors import ModelNotAllowed, NoRegionAllowed
from shared.tenancy.tenant import TenantRecord


def may_use(tenant: TenantRecord, model: str) -> bool:
    return tenant.allowed_models is None or model in tenant.allowed_models


def check_model(tenant: TenantRecord, model: str) -> None:
    """Raises ModelNotAllowed."""
    if not may_use(tenant, model):
        raise ModelNotAllowed(f"this tenant may not use the model {model!r}", param="model")


def check_regions(tenant: TenantRecord) -> None:
    """On the wire no region means all of them, so no region at all ends here."""
    if tenant.allowed_regions is not None and not tenant.allowed_regions:
        raise NoRegionAllowed("this tenant's data may be in no region: nothing can serve it")


def priority_of(tenant: TenantRecord, asked: int | None) -> int:
    """Higher goes first; a request may ask for less than its tenant has, never for more."""
    return tenant.priority if asked is None else min(asked, tenant.priority)
