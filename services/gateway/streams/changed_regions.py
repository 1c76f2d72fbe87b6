"""Requests of a tenant whose regions have changed. Pure functions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from shared.errors import HearthError
from shared.messages import Request


@dataclass(frozen=True, slots=True)
class ChangedRegions:
    """The regions of a tenant now, as its requests name them: none stand for all. `error` ends its
    requests here: this gateway may no longer have them. A tenant that `is_gone` has no region.
    """

    tenant_id: str
    allowed_regions: tuple[str, ...] = ()
    region_class: str = ""
    error: HearthError | None = None
    is_gone: bool = False

    def applied(self, request: Request) -> Request:
        return msgspec.structs.replace(
            request, allowed_regions=self.allowed_regions, region_class=self.region_class
        )

    def narrows(self, request: Request) -> bool:
        """Whether a part of the request may be where it may not be any more."""
        if not _covers(self.allowed_regions, request.allowed_regions):
            return True
        return bool(self.region_class) and request.region_class != self.region_class


def _covers(after: Collection[str], before: Collection[str]) -> bool:
    """Whether all regions allowed before still are; none: all."""
    return not after or (bool(before) and set(before) <= set(after))
