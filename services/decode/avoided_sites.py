"""Sites whose prefills have failed get none for a while, longer after each failure. No I/O.

A scheduler does not know that KV cannot reach a worker, as behind a firewall: without a pause each
long prompt would wait for a connection that nobody accepts.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S, MAX_S = 2.0, 120.0


@dataclass(slots=True)
class _SiteFailures:
    num: int = 0
    avoided_until: float = 0.0


class AvoidedSites:
    def __init__(self) -> None:
        self._failures: dict[str, _SiteFailures] = {}

    def is_avoided(self, site: str, now: float) -> bool:
        known = self._failures.get(site)
        return known is not None and now < known.avoided_until

    def failed(self, site: str, now: float) -> None:
        """Records a failure. Those of handoffs that ran at the same time count as one."""
        known = self._failures.setdefault(site, _SiteFailures())
        if now >= known.avoided_until:
            known.avoided_until = now + min(FIRST_S * 2.0**known.num, MAX_S)
            known.num = min(known.num + 1, 16)

    def succeeded(self, site: str) -> None:
        self._failures.pop(site, None)
