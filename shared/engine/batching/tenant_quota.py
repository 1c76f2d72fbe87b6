"""One tenant's share of the cache: its findable blocks, their limit, and the order of eviction.

A pool stores a share only while its tenant has findable blocks, so there are never more shares than
blocks, however many tenants send requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class TenantQuota:
    num_blocks: int = 0  # findable, including those of running sequences and pins
    max_blocks: int | None = None  # None: no quota
    evictable: OrderedDict[int, None] = field(default_factory=OrderedDict)  # oldest first
    last_evictable: OrderedDict[int, None] = field(default_factory=OrderedDict)  # pinned ones

    @property
    def has_to_give(self) -> bool:
        """Whether it is over its quota and has unreferenced blocks."""
        is_over = self.max_blocks is not None and self.num_blocks > self.max_blocks
        return is_over and bool(self.evictable or self.last_evictable)
