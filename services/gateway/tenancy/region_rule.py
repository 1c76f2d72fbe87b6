"""Which tenants a gateway serves: those whose data may be in its region."""

from __future__ import annotations

import msgspec

from services.gateway.tenancy.errors import NoRegionAllowed
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.tenancy.refusals import Refusals
from shared.tenancy.residency import reason_against, regions_of
from shared.tenancy.tenant import TenantRecord


class RegionRule:
    """Applied to each record of a request's tenant, before the gateway reads the body. Without
    `refusals` nothing is counted.
    """

    def __init__(
        self,
        region: str = "",
        classes: RegionClasses = NO_CLASSES,
        refusals: Refusals | None = None,
    ) -> None:
        self._region = region
        self._classes = classes
        self._refusals = refusals

    def admitted(self, tenant: TenantRecord) -> TenantRecord:
        """Returns the record with the regions of its class, as far as they are allowed. Raises
        NoRegionAllowed.
        """
        regions = regions_of(tenant, self._classes)
        if regions is None:
            return tenant
        reason = reason_against(tenant, self._region, self._classes)
        if reason:
            if self._refusals is not None:
                self._refusals.count("gateway", tenant.tenant_id, self._region)
            raise NoRegionAllowed(reason)
        if not tenant.region_class:
            return tenant
        return msgspec.structs.replace(tenant, allowed_regions=tuple(sorted(regions)))
