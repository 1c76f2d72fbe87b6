"""Answers with receipts, and with the keys that sign them."""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from services.gateway.http.errors import RouteNotFound
from services.gateway.receipts.receipts import Receipts
from services.gateway.receipts.site_receipts import SiteReceipts
from shared.clock import Clock
from shared.errors import InvalidRequest
from shared.receipts.jws import JwkSet, jwk_of
from shared.receipts.receipt import IssuedReceipt
from shared.store import Store, StoreUnavailable
from shared.tenancy.tenant import TenantRecord
from shared.tenancy.tenant_copy import SITE_KEYS
from shared.transport.wire_errors import UNREADABLE

log = structlog.get_logger(__name__)

READ_S = 10.0  # anybody may ask for the keys
KEY_BYTES = 32
NOT_FOUND = (
    "no gateway of this site has a receipt of such a request: ask at the site to which the request "
    "was sent"
)


class ReceiptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`request` is the id of a request, or of its response."""

    request: str


class TenantReceipts:
    def __init__(
        self, receipts: Receipts, at_site: SiteReceipts, store: Store, clock: Clock
    ) -> None:
        """`at_site` are those of all gateways of this site."""
        self._receipts = receipts
        self._at_site = at_site
        self._store = store
        self._clock = clock
        self._linked: dict[str, bytes] = {}  # keys of linked sites
        self._read_at = -READ_S
        self._reading = asyncio.Lock()

    async def find(self, tenant: TenantRecord, name: str) -> IssuedReceipt:
        """Raises RouteNotFound alike for a request without a receipt, for one that is forgotten,
        and for one of another tenant or site.
        """
        found, num_silent = await self._at_site.find(tenant, name)
        if found is None:
            silent = f"; {num_silent} of its gateways did not answer" if num_silent else ""
            raise RouteNotFound(f"{NOT_FOUND}{silent}")
        return found

    async def answer(self, tenant: TenantRecord, body: bytes) -> bytes:
        """Answers a request over NATS. Raises InvalidRequest and as `find` does."""
        try:
            request = msgspec.json.decode(body, type=ReceiptRequest)
        except UNREADABLE as error:
            raise InvalidRequest(f'the body must be {{"request": ID}}: {error}') from None
        return msgspec.json.encode(await self.find(tenant, request.request))

    async def keys(self) -> JwkSet:
        """Returns the keys of this site, and of linked sites those that this site has pinned."""
        linked = await self._linked_keys()
        found = (jwk_of(key, site) for site, key in sorted(linked.items()))
        return JwkSet((*self._receipts.public_keys, *found))

    async def _linked_keys(self) -> dict[str, bytes]:
        """Concurrent callers share one reading."""
        async with self._reading:
            if self._clock.now() - self._read_at >= READ_S:
                try:
                    found = await self._store.hash_get(SITE_KEYS)
                except StoreUnavailable as error:
                    log.warning("site_keys_not_read", error=error.message)
                else:
                    self._linked = {
                        site.decode(errors="replace"): key
                        for site, key in found.items()
                        if len(key) == KEY_BYTES
                    }
                self._read_at = self._clock.now()
            return self._linked
