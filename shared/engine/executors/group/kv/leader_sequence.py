"""A sequence, as far as a rank knows it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LeaderSequence:
    """A `PushedSequence` and `ReservedSequence` of `num_tokens` to push, or to receive."""

    num_tokens: int
    num_cached_tokens: int = 0
    tenant_id: str = ""  # of a push, whose frames take turns with those of other tenants
    is_zero_retention: bool = False
    block_tables: list[list[int]] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens
