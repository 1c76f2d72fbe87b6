"""Which tenants a gateway serves: those whose data may be in its region."""

from __future__ import annotations

import msgspec

from services.gateway.tenancy.errors import NoRegionAllowed
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.tenancy.refusals import Refusals
from shared.tenancy.residency import (
    advice_to_declare,
    class_on_bus,
    reason_against,
    regions_of,
)
from shared.tenancy.tenant import TenantRecord


class RegionRule:
    """Applied to each record of a request's tenant, before the gateway reads the body. Without
    `refusals` nothing is counted.

    nats-server holds data of a class back, and knows no other bound. So on a site that `is_linked`
    to others each bound tenant needs a class.
    """

    def __init__(
        self,
        region: str = "",
        classes: RegionClasses = NO_CLASSES,
        refusals: Refusals | None = None,
        *,
        is_linked: bool = False,
    ) -> None:
        self._region = region
        self._classes = classes
        self._refusals = refusals
        self._is_linked = is_linked

    def admitted(self, tenant: TenantRecord) -> TenantRecord:
        """Returns the record as requests name it. Raises NoRegionAllowed, and counts."""
        if reason := self.refused(tenant):
            raise NoRegionAllowed(reason)
        return self.named(tenant)

    def refused(self, tenant: TenantRecord) -> str:
        """Returns why this gateway may not serve a tenant, and counts it; "" if it may."""
        reason = self._reason_against(tenant)
        if reason and self._refusals is not None:
            self._refusals.count("gateway", tenant.tenant_id, self._region)
        return reason

    def named(self, tenant: TenantRecord) -> TenantRecord:
        """Returns the record with the class that subjects of its data name, and the regions of that
        class as far as they are allowed.
        """
        name = class_on_bus(tenant, self._classes)
        if not name:
            return tenant
        regions = tuple(sorted(regions_of(tenant, self._classes) or ()))
        return msgspec.structs.replace(tenant, region_class=name, allowed_regions=regions)

    def has_no_region(self, tenant: TenantRecord) -> bool:
        return regions_of(tenant, self._classes) == frozenset()

    def _reason_against(self, tenant: TenantRecord) -> str:
        reason = reason_against(tenant, self._region, self._classes)
        is_bound = tenant.allowed_regions is not None
        if not reason and self._is_linked and is_bound and not class_on_bus(tenant, self._classes):
            return advice_to_declare(tenant.allowed_regions or ())
        return reason
