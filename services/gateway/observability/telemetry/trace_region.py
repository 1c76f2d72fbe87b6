"""Whose spans may go to the collector: those of tenants whose data may be in its region."""

from __future__ import annotations

from shared.errors import OutsideRegions
from shared.tenancy.refusals import Refusals
from shared.tenancy.tenant import TenantRecord


class TraceRegion:
    """Counts the tenants whose spans stay here. `region` "" is that of the process."""

    def __init__(self, region: str, refusals: Refusals) -> None:
        self._region = region or refusals.region
        self._refusals = refusals

    def may_export(self, tenant: TenantRecord) -> bool:
        try:
            self._refusals.require("trace", tenant, self._region)
        except OutsideRegions:
            return False
        return True
