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
        return "" if self._index_regions().issubset(regions) else WITHHELD

    def unlisted(self) -> frozenset[str]:
        """Returns the tenants whose blocks without a class may not be listed to an index that asks:
        one may have joined since they were announced.
        """
        found = self._index_regions()
        return frozenset(each for each, own in self._bound.items() if not found.issubset(own))

    def _index_regions(self) -> set[str]:
        """An index that starts, or is silent, counts as well: it may hear the worker."""
        peers = (each for each in self._fleet.everyone() if each.state != "stopped")
        return {each.region for each in peers if "kv_index" in each.roles}
