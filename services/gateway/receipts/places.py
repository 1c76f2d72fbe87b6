"""The sites and regions of processes, also of those that have left."""

from __future__ import annotations

from collections.abc import Callable

from shared.messages import Heartbeat
from shared.receipts.receipt import PlacedProcess
from shared.subjects import at_site, site_in

MAX_PROCESSES = 16_384


class Places:
    """Remembers the regions that processes announced. `region_of_site` returns that of a linked
    site, or "".
    """

    def __init__(
        self, gateway_id: str, site: str, region: str, region_of_site: Callable[[str], str]
    ) -> None:
        self.own = PlacedProcess(id=gateway_id, site=site, region=region)
        self._region_of_site = region_of_site
        self._regions = {gateway_id: region}

    def observe(self, heartbeat: Heartbeat) -> None:
        if heartbeat.region or heartbeat.process_id in self._regions:
            self._regions[heartbeat.process_id] = heartbeat.region
        if len(self._regions) > MAX_PROCESSES:
            del self._regions[next(each for each in self._regions if each != self.own.id)]

    def region_of(self, process_id: str) -> str:
        """Returns "" for a process whose region is not known."""
        site = site_in(process_id)
        return self._regions.get(process_id, "") if site is None else self._region_of_site(site)

    def of(self, process_id: str, site: str = "") -> PlacedProcess:
        """`site` is where the id comes from, if not from here: a site names its own processes
        without itself.
        """
        if site not in ("", self.own.site) and site_in(process_id) is None:
            process_id = at_site(site, process_id)
        found = site_in(process_id) or self.own.site
        return PlacedProcess(id=process_id, site=found, region=self.region_of(process_id))
