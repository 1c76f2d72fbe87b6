"""Responses in Redis: any gateway goes on from a response of any other.

A record is written behind its response, which does not wait for it. Reads wait for the writes of
this gateway, and read once more before they answer that a response is unknown: another gateway may
be writing it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog

from services.gateway.responses.ids import is_response_id
from services.gateway.responses.storage import scripts
from services.gateway.responses.storage.errors import UnknownResponse
from services.gateway.responses.storage.record import ResponseRecord
from services.gateway.tenancy.errors import NoRegionAllowed, ZeroRetentionRejected
from shared.background import Background
from shared.clock import Clock
from shared.errors import PayloadTooLarge
from shared.store import Store, StoreUnavailable
from shared.tenancy.pinned_prefix import key_part
from shared.tenancy.tenant import TenantRecord
from shared.transport.wire_errors import UNREADABLE

log = structlog.get_logger(__name__)

TTL_S = 24 * 3600.0
MAX_BYTES_PER_TENANT = 64 << 20
MAX_RECORD_BYTES = 4 << 20
MAX_PENDING_BYTES = 64 << 20  # of records that are being written
MAX_CHAIN = 1000
MAX_CHAIN_BYTES = 16 << 20
READ_AGAIN_S = 0.1
PREVIOUS = "previous_response_id"
UNKNOWN = "there is no response with this id"


class ResponseStore:
    """`region`: of this gateway. `now`: unix seconds. `count`: called with what became of a record:
    stored, evicted, too_large, failed.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        region: str,
        now: Callable[[], float],
        count: Callable[[str], None],
        ttl_s: float = TTL_S,
        max_bytes: int = MAX_BYTES_PER_TENANT,
    ) -> None:
        self._store = store
        self._clock = clock
        self._region = region
        self._now = now
        self._count = count
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._background = Background()
        self._pending: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._num_pending_bytes = 0

    def may_store(self, tenant: TenantRecord) -> bool:
        regions = tenant.allowed_regions
        return not tenant.is_zero_retention and (regions is None or self._region in regions)

    def check_may_store(self, tenant: TenantRecord, param: str) -> None:
        """Raises ZeroRetentionRejected, NoRegionAllowed."""
        if tenant.is_zero_retention:
            raise ZeroRetentionRejected(
                f"{param}: stored responses hold text; this tenant has zero retention", param=param
            )
        if not self.may_store(tenant):
            raise NoRegionAllowed(
                f"{param}: this gateway is in none of the tenant's regions", param=param
            )

    async def check_available(self, tenant: TenantRecord) -> None:
        """Raises StoreUnavailable."""
        await self._store.sorted_set_size(_keys(tenant.tenant_id)[1])

    def save(self, tenant: TenantRecord, record: ResponseRecord) -> None:
        """Returns at once; a failure is counted."""
        size = record.num_bytes
        if size > MAX_RECORD_BYTES:
            self._count("too_large")
            return
        if self._num_pending_bytes + size > MAX_PENDING_BYTES:
            self._count("failed")
            return
        key = (tenant.tenant_id, record.id)
        self._num_pending_bytes += size
        self._pending[key] = self._background.start(self._save(key, record))

    async def get(
        self, tenant: TenantRecord, response_id: str, param: str = "response_id"
    ) -> ResponseRecord:
        """Raises UnknownResponse, StoreUnavailable."""
        now = self._now()
        data = await self._read(tenant, scripts.READ, response_id, now)
        record = None if data is None else _decoded(data)
        if record is None:
            raise UnknownResponse(UNKNOWN, param=param)
        return record

    async def chain(self, tenant: TenantRecord, response_id: str) -> list[ResponseRecord]:
        """The response and those before it, oldest first. Raises UnknownResponse, PayloadTooLarge,
        StoreUnavailable.
        """
        bounds = (MAX_CHAIN, MAX_CHAIN_BYTES)
        found = await self._read(tenant, scripts.CHAIN, response_id, self._now(), *bounds)
        if found in (b"too_long", b"too_large"):
            raise PayloadTooLarge(
                f"{PREVIOUS}: the responses before it are more than {MAX_CHAIN}, or than "
                f"{MAX_CHAIN_BYTES >> 20} MiB",
                param=PREVIOUS,
            )
        records = [] if found is None else [_decoded(data) for data in reversed(found)]
        known = [each for each in records if each is not None]
        if not known or len(known) < len(records):
            raise UnknownResponse(UNKNOWN, param=PREVIOUS)
        return known

    async def delete(self, tenant: TenantRecord, response_id: str) -> None:
        """Raises UnknownResponse, StoreUnavailable."""
        if not await self._read(tenant, scripts.DELETE, response_id):
            raise UnknownResponse(UNKNOWN, param="response_id")

    async def stop(self) -> None:
        """Waits for the writes that have begun: each ends in bounded time."""
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await self._background.stop()

    async def _read(
        self, tenant: TenantRecord, script: str, response_id: str, *arguments: float
    ) -> Any:
        """None for an unknown response."""
        if not is_response_id(response_id):
            response_id = ""  # the same reads and the same time as of an unknown one
        for is_last in (False, True):
            pending = self._pending.get((tenant.tenant_id, response_id))
            if pending is not None:
                await asyncio.wait({pending})
            keys = _keys(tenant.tenant_id)
            found = await self._store.evaluate(script, keys, [response_id, *arguments])
            if found not in (None, 0, b"unknown"):
                return found
            if not is_last:
                await self._clock.sleep(READ_AGAIN_S)
        return None

    async def _save(self, key: tuple[str, str], record: ResponseRecord) -> None:
        tenant_id, response_id = key
        try:
            num_evicted = await self._store.evaluate(
                scripts.SAVE,
                _keys(tenant_id),
                [
                    *(response_id, msgspec.msgpack.encode(record), record.previous),
                    *(max(1, int(self._ttl_s)), self._now(), self._max_bytes),
                ],
            )
        except StoreUnavailable as error:
            self._count("failed")
            log.warning("response_not_stored", response=response_id, reason=error.message)
            return
        finally:
            self._num_pending_bytes -= record.num_bytes
            del self._pending[key]
        self._count("stored")
        for _ in range(num_evicted):
            self._count("evicted")


def _keys(tenant_id: str) -> Sequence[str]:
    start = f"hearth:{key_part(tenant_id)}:response"
    return (f"{start}:", *(f"{start}s:{name}" for name in ("uses", "ends", "sizes")))


def _decoded(data: bytes) -> ResponseRecord | None:
    """None for an unreadable record."""
    try:
        return msgspec.msgpack.decode(data, type=ResponseRecord)
    except UNREADABLE:
        return None
