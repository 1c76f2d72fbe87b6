"""Refusals by residency: one count, one line of the log and one record of the audit log for each
kind, whichever process refuses.

Each process counts its own and reports them in its heartbeats. From there gateways make the metric
`hearth_residency_refusals_total`, and write what has increased into the audit log.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import Literal

import structlog

from shared.errors import OutsideRegions
from shared.messages import MAX_REFUSALS, Heartbeat, ResidencyRefusals
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.telemetry.log_limit import LogLimit
from shared.tenancy.residency import Owner, regions_of

log = structlog.get_logger(__name__)

# What refused: a process for a request of the tenant, one end of the data plane for its KV, a link
# to a site, or the export of its spans. What is not stored is in the audit log alone.
Check = Literal[
    "gateway",
    "scheduler",
    "decode",
    "encode",
    "prefill",
    "kv_index",
    "host",
    "pin",
    "kv_push",
    "kv_receive",
    "pixels",
    "site",
    "trace",
    "bus",
]
MAX_KINDS = 1024  # of one process; the counts of the others are lost, but for the totals


class Refusals:
    """The refusals of one process, in `region`. `totals` are by check, `classes` the declared
    ones.
    """

    def __init__(
        self, region: str, classes: RegionClasses = NO_CLASSES, lines: LogLimit | None = None
    ) -> None:
        self.region = region
        self.classes = classes
        self.totals: Counter[Check] = Counter()
        self._lines = LogLimit() if lines is None else lines
        self._kinds: OrderedDict[tuple[Check, str, str], int] = OrderedDict()  # last one last

    def require(
        self, check: Check, owner: Owner, region: str | None = None
    ) -> frozenset[str] | None:
        """Returns the regions that may hold data of the owner; None: all. Raises OutsideRegions,
        and counts, unless `region` is one of them; None is this process's own.
        """
        regions = regions_of(owner, self.classes)
        self.check(check, owner.tenant_id, regions, region)
        return regions

    def check(
        self,
        check: Check,
        tenant_id: str,
        regions: Collection[str] | None,
        region: str | None = None,
    ) -> None:
        """Raises OutsideRegions, and counts, unless `regions`, those of the tenant's data, have the
        region; None: all do. `region` None is this process's own.
        """
        region = self.region if region is None else region
        if regions is not None and region not in regions:
            self.count(check, tenant_id, region)
            where = f"the region {region!r}" if region else "a process without a region"
            raise OutsideRegions(f"{check}: {where} is none of those of the tenant's data")

    def count(self, check: Check, tenant_id: str, region: str) -> None:
        """Counts a refusal to have data of the tenant in the region."""
        kind = (check, tenant_id, region)
        self.totals[check] += 1
        self._kinds[kind] = self._kinds.pop(kind, 0) + 1
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        fields = {"check": check, "tenant": tenant_id, "wanted": region, "own": self.region}
        self._lines.write(log.warning, "residency_refused", f"{check} {tenant_id}", **fields)

    def last(self) -> tuple[ResidencyRefusals, ...]:
        """Returns the counts of the kinds that came last."""
        kinds = list(self._kinds.items())[-MAX_REFUSALS:]
        return tuple(ResidencyRefusals(*kind, count) for kind, count in kinds)


class RefusalIncreases:
    """Finds in heartbeats what has been refused since those before. One for all processes."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, dict[tuple[str, str, str], int]]] = {}

    def take(self, heartbeat: Heartbeat) -> list[ResidencyRefusals]:
        """Returns the kinds that have increased, with their increase."""
        epoch, counts = self._counts.get(heartbeat.process_id, (heartbeat.epoch, {}))
        if epoch != heartbeat.epoch:
            counts = {}
        found = []
        for each in heartbeat.refusals:
            kind = (each.check, each.tenant_id, each.region)
            more = each.count - counts.get(kind, 0)
            if more > 0:
                found.append(ResidencyRefusals(*kind, more))
        if heartbeat.refusals:
            latest = {(e.check, e.tenant_id, e.region): e.count for e in heartbeat.refusals}
            merged = {**counts, **latest}
            kept = dict(list(merged.items())[-MAX_KINDS:])
            self._counts[heartbeat.process_id] = heartbeat.epoch, kept
        return found

    def forget(self, process_id: str) -> None:
        """Forgets a process that has left the fleet."""
        self._counts.pop(process_id, None)
