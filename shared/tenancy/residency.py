"""May a region hold data of a tenant? The one answer, for every process that has any.

`allowed_regions` of a tenant and the regions of its class hold together. All fails closed: a class
that is not declared here has no region, and a process without a region is in none.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import structs

from shared.errors import OutsideRegions
from shared.messages import EncodeImage, PinPrefix, Request, RunPrefill
from shared.regions.region_classes import RegionClasses
from shared.tenancy.tenant import TenantRecord

# Who a residency is of: a tenant, or a message with its data.
Owner = TenantRecord | Request | RunPrefill | PinPrefix | EncodeImage


def regions_of(owner: Owner, classes: RegionClasses) -> frozenset[str] | None:
    """Returns the regions that may hold data of a tenant, or of one of its messages; None: all."""
    if isinstance(owner, TenantRecord):
        return classes.allowed(owner.region_class, owner.allowed_regions)
    # on the wire no region stands for all
    return classes.allowed(owner.region_class, owner.allowed_regions or None)


def may_hold(owner: Owner, region: str, classes: RegionClasses) -> bool:
    """Returns whether a process in `region` ("": in none) may hold data of this owner."""
    regions = regions_of(owner, classes)
    return regions is None or region in regions


def class_on_bus(record: TenantRecord, classes: RegionClasses) -> str:
    """Returns the class that subjects of the tenant's data name: that of its record, or the one of
    exactly its allowed regions; "" if nats-server knows none of them.
    """
    if record.region_class or record.allowed_regions is None:
        return record.region_class
    return classes.of_exactly(record.allowed_regions)


def advice_to_declare(regions: Collection[str]) -> str:
    """Returns why a linked site serves no tenant with these allowed regions and without a class."""
    named = ",".join(sorted(regions))
    return (
        f"this site is linked to others, and no region class has exactly the allowed regions "
        f"{named} of this tenant: declare a class (--class NAME={named}), or give the tenant one"
    )


def within_class(request: Request, classes: RegionClasses) -> Request:
    """Returns a request with the regions of its class as its allowed ones, as far as they were:
    placement follows them. Raises OutsideRegions if none is left.
    """
    if not request.region_class:
        return request
    regions = tuple(sorted(regions_of(request, classes) or ()))
    if not regions:
        raise OutsideRegions(f"no region is left for a request of {request.region_class!r}")
    return structs.replace(request, allowed_regions=regions)


def reason_against(owner: Owner, region: str, classes: RegionClasses) -> str:
    """Returns why a process in `region` may not hold data of this owner, as a clause for its
    operator and for clients; "" if it may.
    """
    if may_hold(owner, region, classes):
        return ""
    name = owner.region_class
    if name and name not in classes.regions:
        return f"the region class {name!r} of this tenant is not declared here"
    where = f"in the region {region!r}" if region else "in no region"
    allowed = ", ".join(sorted(regions_of(owner, classes) or ())) or "no region"
    return f"this process is {where}; data of this tenant may be in {allowed} alone"
