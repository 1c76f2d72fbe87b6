"""Decides which sightings are leaks: where the data of a tenant may be, at each time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.simulation.residency.plan import CLASSES, PLANTED, Limits, TenantPlan
from tests.support.canaries.search import Sighting

# From a change until nothing of the tenant lies elsewhere: gateways read the record again after
# 0.5 s, and what follows takes heartbeats.
WITHDRAWN_S = 1.5


class Place(NamedTuple):
    """Where and when bytes were seen. `regions` None: nobody's data may be there."""

    kind: str  # subject, frame, Redis, span, log, file, digest, memory
    name: str
    regions: frozenset[str] | None
    at_s: float


@dataclass
class Borders:
    """`withdrawn_s`: a process that is frozen or cut off learns of a change when it is back."""

    withdrawn_s: float = WITHDRAWN_S
    leaks: Counter[str] = field(default_factory=Counter)
    planted: Counter[str] = field(default_factory=Counter)  # those found, by kind of place
    examples: dict[str, str] = field(default_factory=dict)
    num_seen: Counter[str] = field(default_factory=Counter)  # sightings by kind of place
    forgetful: set[str] = field(default_factory=set)  # tenants with zero retention
    is_over: bool = False  # all requests have ended: their KV is zeroed
    _since: dict[str, list[tuple[float, Limits]]] = field(default_factory=lambda: defaultdict(list))

    def begin(self, tenants: Iterable[TenantPlan]) -> None:
        for each in tenants:
            self._since[each.tenant_id].append((0.0, each.limits))
            if each.is_zero_retention:
                self.forgetful.add(each.tenant_id)

    def change(self, tenant_id: str, limits: Limits, at_s: float) -> None:
        self._since[tenant_id].append((at_s, limits))

    def judge(self, found: Iterable[tuple[object, Sighting]]) -> None:
        for place, sighting in found:
            assert isinstance(place, Place)
            self.num_seen[place.kind] += 1
            if sighting.tenant_id == PLANTED:
                self.planted[place.kind] += self.forbidden(PLANTED, place) is not None
                continue
            forbidden = self.forbidden(sighting.tenant_id, place)
            if forbidden is not None:
                leak = f"{place.kind}: {sighting.form} in {place.name}"
                self.leaks[leak] += 1
                self.examples.setdefault(
                    leak, f"{sighting.tenant_id} in {forbidden} at {place.at_s:.3f} s"
                )

    def forbidden(self, tenant_id: str, place: Place) -> str | None:
        """Returns the regions of a place that the tenant's data may not be in, or None."""
        if place.regions is None or self._is_retained(tenant_id, place):
            return "any region"
        allowed = self._allowed(tenant_id, place.at_s)
        if allowed is None or place.regions <= allowed:
            return None
        return ", ".join(sorted(place.regions - allowed)) or "no region"

    def may_name(self, tenant_id: str, region_class: str, at_s: float) -> bool:
        """Whether a message of the class may have data of the tenant: it is the tenant's own, or
        all who can read it are in regions of the tenant.
        """
        if any(each.class_on_bus == region_class for each in self._limits(tenant_id, at_s)):
            return True
        readers, allowed = CLASSES.allowed(region_class, None), self._allowed(tenant_id, at_s)
        return readers is not None and (allowed is None or readers <= set(allowed))

    def _is_retained(self, tenant_id: str, place: Place) -> bool:
        """Whether a place outlives the requests of a tenant that has zero retention."""
        is_lasting = place.kind == "Redis" or (place.kind == "memory" and self.is_over)
        return is_lasting and tenant_id in self.forgetful

    def _allowed(self, tenant_id: str, at_s: float) -> Collection[str] | None:
        """Returns the regions allowed at any time in the last `withdrawn_s`; None: all."""
        found: set[str] = set()
        for limits in self._limits(tenant_id, at_s):
            if limits.regions is None:
                return None
            found |= limits.regions
        return found

    def _limits(self, tenant_id: str, at_s: float) -> list[Limits]:
        """Returns the limits at any time in the last `withdrawn_s`."""
        periods = self._since[tenant_id]
        if len(periods) == 1:
            return [periods[0][1]]
        ends = [since for since, _ in periods[1:]] + [at_s]
        return [
            limits
            for (since, limits), end in zip(periods, ends, strict=True)
            if since <= at_s and end >= at_s - self.withdrawn_s
        ]
