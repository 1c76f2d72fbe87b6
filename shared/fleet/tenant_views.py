"""Where requests of tenants ran, and what was refused to have of their data. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from shared.messages import Heartbeat

MAX_REFUSALS_SHOWN = 64


class TenantSite(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requests of a tenant that ended at one site and in one region, since the start of the
    gateways. The site is empty without links, the region for workers without one.
    """

    tenant_id: str
    site: str = ""
    region: str = ""
    num_requests: int

    def __str__(self) -> str:
        place = "/".join(filter(None, (self.site, self.region)))
        return f"{place} {self.num_requests:,}"


class TenantRefusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often processes have refused, by one check, to have data of a tenant in a region."""

    tenant_id: str
    check: str
    region: str = ""
    count: int

    def __str__(self) -> str:
        return f"{self.check} {self.count:,} ({self.region or 'no region'})"


def tenant_sites(heartbeats: Iterable[Heartbeat]) -> list[TenantSite]:
    """Returns the requests by tenant, site and region, summed over gateways, the most frequent
    first.
    """
    sums: Counter[tuple[str, str, str]] = Counter()
    for each in heartbeats:
        for counted in () if each.gateway is None else each.gateway.site_requests:
            sums[counted.tenant_id, counted.site, counted.region] += counted.num_requests
    return [
        TenantSite(tenant_id=tenant, site=site, region=region, num_requests=count)
        for (tenant, site, region), count in sums.most_common()
    ]


def tenant_refusals(heartbeats: Iterable[Heartbeat]) -> list[TenantRefusal]:
    """Returns the refusals by tenant, check and region, summed over processes, the most frequent
    first.
    """
    sums: Counter[tuple[str, str, str]] = Counter()
    for heartbeat in heartbeats:
        for each in heartbeat.refusals:
            sums[each.tenant_id, each.check, each.region] += each.count
    return [
        TenantRefusal(tenant_id=tenant, check=check, region=region, count=count)
        for (tenant, check, region), count in sums.most_common(MAX_REFUSALS_SHOWN)
    ]
