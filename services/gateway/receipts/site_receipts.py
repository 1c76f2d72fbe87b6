"""The receipts of all gateways of this site: a gateway asks the others for what it has not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple
from weakref import WeakValueDictionary

import structlog

from services.gateway.receipts.receipts import Receipts
from shared.background import start_awaited
from shared.errors import HearthError
from shared.lifecycle.heartbeat import HealthMonitor
from shared.receipts.read_receipt import ReadReceipt, ReceiptRead
from shared.receipts.receipt import IssuedReceipt
from shared.subjects import is_at_site, receipt
from shared.tenancy.residency import may_hold
from shared.tenancy.tenant import TenantRecord
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)

TIMEOUT_S = 1.0  # of all that are asked together
MAX_NAME = 256  # characters of an id
MAX_ASKED = 64  # gateways
MAX_SEARCHES = 16  # at once; further ones wait
MAX_OF_TENANT = 4  # of these, so that no tenant has the others wait behind all of its own


class Found(NamedTuple):
    """`num_silent` gateways were asked in vain."""

    receipt: IssuedReceipt | None
    num_silent: int = 0


class SiteReceipts:
    def __init__(
        self,
        receipts: Receipts,
        request_id_of: Callable[[str], str],
        record_of: Callable[[str], Awaitable[TenantRecord | None]],
        bus: Bus,
        health_monitor: HealthMonitor,
    ) -> None:
        """`request_id_of` returns the id of a request by that of its response. `record_of` returns
        the record of a tenant; it may raise a HearthError.
        """
        self._receipts = receipts
        self._request_id_of = request_id_of
        self._record_of = record_of
        self._bus = bus
        self._fleet = health_monitor.fleet
        self._refusals = health_monitor.refusals
        self._searches = asyncio.Semaphore(MAX_SEARCHES)
        # by tenant, as long as one of its searches runs or waits
        self._of_tenants = WeakValueDictionary[str, asyncio.Semaphore]()

    async def serve(self) -> None:
        """Answers the other gateways."""
        await self._bus.serve(receipt(self._bus.process_id), ReadReceipt, self._read)

    async def find(self, tenant: TenantRecord, name: str) -> Found:
        """Finds the receipt of a request, here or at another gateway of this site. `name` is the
        id of the request or of its response.
        """
        own = self._own(tenant, name)
        if own is not None or len(name) > MAX_NAME:
            return Found(own)
        of_tenant = self._of_tenants.setdefault(tenant.tenant_id, asyncio.Semaphore(MAX_OF_TENANT))
        async with of_tenant, self._searches:
            return await self._search(tenant, name)

    def _own(self, tenant: TenantRecord, name: str) -> IssuedReceipt | None:
        found = self._receipts.read(tenant, name)
        return self._receipts.read(tenant, self._request_id_of(name)) if found is None else found

    # ── other gateways ───────────────────────────────────────────────────────────────────────────

    async def _search(self, tenant: TenantRecord, name: str) -> Found:
        asked = [start_awaited(self._ask(each, tenant.tenant_id, name)) for each in self._others()]
        num_silent = 0
        try:
            for each in asyncio.as_completed(asked):
                reply = await each
                if reply is None:
                    num_silent += 1
                elif reply.receipt is not None:
                    return Found(reply.receipt)
        finally:
            for task in asked:
                task.cancel()
        return Found(None, num_silent)

    def _others(self) -> list[str]:
        return list(self._live_gateways())[:MAX_ASKED]

    def _live_gateways(self) -> Iterator[str]:
        """Yields the other gateways of this site, also those that drain."""
        for each in self._fleet.everyone():
            name = each.process_id
            is_other = name != self._bus.process_id and not is_at_site(name)
            if is_other and "gateway" in each.roles and self._fleet.is_live(name):
                yield name

    async def _ask(self, gateway_id: str, tenant_id: str, name: str) -> ReceiptRead | None:
        question = ReadReceipt(
            gateway_id=self._bus.process_id, tenant_id=tenant_id, request_id=name
        )
        try:
            return await self._bus.request(
                receipt(gateway_id), question, ReceiptRead, timeout_s=TIMEOUT_S
            )
        except HearthError as error:
            log.debug("receipt_not_read", gateway=gateway_id, reason=error.message)
            return None

    async def _read(self, question: ReadReceipt) -> ReceiptRead:
        """Answers with a receipt of a tenant that may be here and where the question comes from.
        Raises as `record_of` does.
        """
        tenant = await self._record_of(question.tenant_id)
        if tenant is None or not self._may_read(tenant, question.gateway_id):
            return ReceiptRead()
        return ReceiptRead(receipt=self._own(tenant, question.request_id))

    def _may_read(self, tenant: TenantRecord, gateway_id: str) -> bool:
        regions = {each.region for each in self._fleet.everyone() if each.process_id == gateway_id}
        classes = self._refusals.classes
        return bool(regions) and all(
            may_hold(tenant, each, classes) for each in {self._refusals.region, *regions}
        )
