"""Reports in Redis why prefixes are not warm. Gateways show it."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from shared.store import Store, StoreUnavailable
from shared.tenancy.prefixes import pinned_prefix

log = structlog.get_logger(__name__)

RENEW_S = pinned_prefix.REASONS_S / 4


class PinReasons:
    """Writes the reasons why prefixes are not pinned. `now` returns unix seconds.

    Prefixes without a reason are written, too, as another index may have written one.
    """

    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._reasons: dict[str, dict[str, str]] = {}  # keys: tenant, name; empty: none
        self._unwritten: set[str] = set()  # tenants
        self._renew_at = 0.0

    def explain(self, tenant_id: str, name: str, reason: str) -> None:
        """Records why a prefix is not warm; an empty reason means that it is, or will be soon."""
        reasons = self._reasons.setdefault(tenant_id, {})
        if reasons.get(name) != reason:
            reasons[name] = reason
            self._unwritten.add(tenant_id)

    def forget(self, tenant_id: str) -> None:
        """Forgets a tenant: its prefixes may have changed, and reasons go with the prefixes that
        they explain.
        """
        self._reasons.pop(tenant_id, None)

    def clear(self) -> None:
        self._reasons.clear()

    def distrust(self) -> None:
        """Makes the next write include all reasons, because another index writes now."""
        self._unwritten.update(self._reasons)

    async def write(self) -> None:
        """Writes changed reasons, and all of them long before Redis drops them."""
        if self._now() >= self._renew_at:
            self.distrust()
            self._renew_at = self._now() + RENEW_S
        try:
            for tenant_id in sorted(self._unwritten):
                if reasons := self._reasons.get(tenant_id):
                    await pinned_prefix.explain(self._store, tenant_id, reasons)
                self._unwritten.discard(tenant_id)
        except StoreUnavailable as error:
            log.debug("pin_reasons_not_written", reason=error.message)
