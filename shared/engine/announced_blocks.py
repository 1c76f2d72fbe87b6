"""Which blocks a worker announces to the indexes of its site.

Those of a region class go on subjects of the class. Those of a tenant with allowed regions and no
class would reach every index: they are announced only while each index is in one of these regions.
"""

from __future__ import annotations

from shared.lifecycle.health import Fleet
from shared.messages import PinPrefix, Request, RunPrefill

WITHHELD = "-"  # the class of blocks that are not announced; no region class has this name
MAX_BOUND = 10_000  # tenants


class AnnouncedBlocks:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._bound: dict[str, tuple[str, ...]] = {}  # tenant → its allowed regions, the last last

    def class_of(self, message: Request | RunPrefill | PinPrefix) -> str:
        """Returns the class in which blocks of the message are announced; "": to all indexes."""
        tenant_id, regions = message.tenant_id, message.allowed_regions
        self._bound.pop(tenant_id, None)
        if message.region_class or not regions:
            return message.region_class
        self._bound[tenant_id] = regions
        if len(self._bound) > MAX_BOUND:
            del self._bound[next(iter(self._bound))]
        return "" if self._reach_none_outside(regions) else WITHHELD

    def may_list(self, tenant_id: str) -> bool:
        """Whether blocks without a class may be listed to an index that asks: it may have joined
        since they were announced.
        """
        regions = self._bound.get(tenant_id)
        return regions is None or self._reach_none_outside(regions)

    def _reach_none_outside(self, regions: tuple[str, ...]) -> bool:
        """An index that starts, or is silent, counts as well: it may hear the worker."""
        peers = (each for each in self._fleet.everyone() if each.state != "stopped")
        return all(each.region in regions for each in peers if "kv_index" in each.roles)
