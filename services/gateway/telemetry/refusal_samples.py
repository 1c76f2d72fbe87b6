"""Chooses the refusals that are logged: a tenant over its limits must not fill the disk. No I/O.

The first refusal of a tenant with one outcome is logged, then one in INTERVAL_S with the number of
those since the last line. Metrics count all.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERVAL_S = 10.0
MAX_KEYS = 1024  # the refusals of further tenants and outcomes count together


@dataclass(slots=True)
class _Refusals:
    due_at: float
    num_unlogged: int = 0


class RefusalSamples:
    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], _Refusals] = {}

    def num_to_log(self, tenant_id: str, outcome: str, now: float) -> int:
        """The number of refusals that a line stands for, with this one; 0: no line is due."""
        key = (tenant_id, outcome)
        if key not in self._by_key and len(self._by_key) >= MAX_KEYS:
            self._forget(now)
        if key not in self._by_key and len(self._by_key) >= MAX_KEYS:
            key = ("", "")
        refusals = self._by_key.setdefault(key, _Refusals(due_at=now))
        refusals.num_unlogged += 1
        if now < refusals.due_at:
            return 0
        num_refusals, refusals.num_unlogged = refusals.num_unlogged, 0
        refusals.due_at = now + INTERVAL_S
        return num_refusals

    def _forget(self, now: float) -> None:
        """Those whose next refusal would be logged in any case."""
        self._by_key = {key: each for key, each in self._by_key.items() if now < each.due_at}
