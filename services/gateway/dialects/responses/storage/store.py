"""Responses in Redis: any gateway goes on from a response of any other.

A record is written behind its response, which does not wait for it. Reads wait for the writes of
this gateway, and read once more before they answer that a response is unknown: another gateway may
be writing it. Sizes are read first, so that a caller counts the bytes before it reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from services.gateway.dialects.responses.ids import is_response_id
from services.gateway.dialects.responses.storage import scripts
from services.gateway.dialects.responses.storage.errors import UnknownResponse
from services.gateway.dialects.responses.storage.record import (
    PREVIOUS,
    UNKNOWN,
    ResponseRecord,
    decoded_record,
)
from services.gateway.tenancy.permissions import (
    Latest,
    OnRefused,
    check_may_store,
    ignore_refusal,
    late_refusal,
    may_store,
)
from shared.background import Background
from shared.clock import Clock
from shared.errors import PayloadTooLarge
from shared.store import Store, StoreUnavailable
from shared.tenancy.stored_responses import response_keys
from shared.tenancy.tenant import RECORD_KEYS, TenantRecord, class_argument

log = structlog.get_logger(__name__)

TTL_S = 24 * 3600.0
MAX_BYTES_PER_TENANT = 64 << 20
MAX_RECORD_BYTES = 4 << 20
MAX_PENDING_BYTES = 64 << 20  # bytes of records that are being written
MAX_CHAIN = 1000
MAX_PART_BYTES = 256 << 10  # bytes of one read, unless a single record is larger
READ_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class StoredSize:
    """A stored response whose record is not read yet."""

    id: str
    num_bytes: int


class ResponseStore:
    """`bulk`: a connection for more than MAX_PART_BYTES, so that slow replies do not open the
    breaker of others (default: `store`). `region`: this gateway's region, in `region_classes`.
    `now`: returns unix seconds. `count`: is called with the outcome of a record: stored, evicted,
    too_large, forbidden, failed. `max_bytes`: of a tenant's records. `max_all_bytes`: returns the
    bytes that the records of all tenants may take in Redis. `latest`: of a tenant of another site,
    whose record Redis cannot tell.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        region: str,
        region_classes: Sequence[str] = (),
        now: Callable[[], float],
        count: Callable[[str], None],
        ttl_s: float = TTL_S,
        max_bytes: int = MAX_BYTES_PER_TENANT,
        max_all_bytes: Callable[[], int],
        bulk: Store | None = None,
        on_refused: OnRefused = ignore_refusal,
        latest: Latest = lambda tenant: tenant,
    ) -> None:
        self._latest = latest
        self._store = store
        self._bulk = store if bulk is None else bulk
        self._clock = clock
        self._region = region
        self._classes = class_argument(region_classes)
        self._on_refused = on_refused
        self._now = now
        self._count = count
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._max_all_bytes = max_all_bytes
        self._background = Background()
        self._pending: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._num_pending_bytes = 0

    def may_store(self, tenant: TenantRecord) -> bool:
        return may_store(tenant, self._region)

    def check_may_store(self, tenant: TenantRecord, param: str) -> None:
        """Raises ZeroRetentionRejected and NoRegionAllowed."""
        check_may_store(tenant, self._region, param, param=param, on_refused=self._on_refused)

    async def check_available(self, tenant: TenantRecord) -> None:
        """Raises StoreUnavailable."""
        await self._store.sorted_set_size(response_keys(tenant.tenant_id)[1])

    def save(self, tenant: TenantRecord, record: ResponseRecord) -> None:
        """Returns at once; a failure is counted."""
        size, latest = record.num_bytes, self._latest(tenant)
        if latest is None or not self.may_store(latest):  # since the response began
            self._refuse(tenant)
            return
        if size > MAX_RECORD_BYTES:
            self._count("too_large")
            return
        if self._num_pending_bytes + size > MAX_PENDING_BYTES:
            self._count("failed")
            return
        key = (tenant.tenant_id, record.id)
        self._num_pending_bytes += size
        self._pending[key] = self._background.start_item(
            self._save(tenant, record), lambda error: self._count("failed")
        )

    async def get(
        self, tenant: TenantRecord, response_id: str, hold: Callable[[int], None]
    ) -> ResponseRecord:
        """Returns the record. `hold`: is called with its bytes before they are read; what it raises
        is raised. Raises UnknownResponse, StoreUnavailable, ZeroRetentionRejected and
        NoRegionAllowed.
        """
        param = "response_id"
        found = await self.sizes(tenant, {response_id: param})
        hold(found[0].num_bytes)
        (data,) = await self.read(tenant, found, param)
        return decoded_record(data, param)

    async def sizes(self, tenant: TenantRecord, params: Mapping[str, str]) -> list[StoredSize]:
        """Returns the sizes of responses. `params`: the place of the request that names each id.
        Raises UnknownResponse, StoreUnavailable, ZeroRetentionRejected and NoRegionAllowed.
        """
        for param in params.values():
            self.check_may_store(tenant, param)
        found = await self._read(tenant, scripts.SIZES, list(params))
        sized = zip(params.items(), found, strict=True)
        return [_known(response_id, size, param) for (response_id, param), size in sized]

    async def chain(self, tenant: TenantRecord, response_id: str) -> list[StoredSize]:
        """Returns the response and those before it, oldest first. Raises UnknownResponse,
        PayloadTooLarge, StoreUnavailable, ZeroRetentionRejected and NoRegionAllowed.
        """
        self.check_may_store(tenant, PREVIOUS)
        found = await self._read(tenant, scripts.CHAIN, [response_id], MAX_CHAIN)
        if found == b"too_long":
            raise PayloadTooLarge(
                f"{PREVIOUS}: the responses before it are more than {MAX_CHAIN}", param=PREVIOUS
            )
        if found == b"unknown":
            raise UnknownResponse(UNKNOWN, param=PREVIOUS)
        sized = zip(found[::2], found[1::2], strict=True)
        return [StoredSize(each.decode(), size) for each, size in sized][::-1]

    async def read(
        self, tenant: TenantRecord, responses: Sequence[StoredSize], param: str
    ) -> list[bytes]:
        """Returns the encoded records. Raises UnknownResponse and StoreUnavailable."""
        is_large = sum(each.num_bytes for each in responses) > MAX_PART_BYTES
        store, keys = self._bulk if is_large else self._store, response_keys(tenant.tenant_id)
        found: list[bytes | None] = []
        for part in _parts(responses):
            ids = [each.id for each in part]
            found += await store.evaluate(scripts.READ, keys, [self._now(), *ids])
        known = [data for data in found if data is not None]
        if len(known) < len(found):  # removed since its size was read
            raise UnknownResponse(UNKNOWN, param=param)
        return known

    async def delete(self, tenant: TenantRecord, response_id: str) -> None:
        """Raises UnknownResponse, StoreUnavailable."""
        if not await self._read(tenant, scripts.DELETE, [response_id]):
            raise UnknownResponse(UNKNOWN, param="response_id")

    async def stop(self) -> None:
        """Waits for the writes that have begun, each of which ends in bounded time."""
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await self._background.stop()

    async def _read(
        self, tenant: TenantRecord, script: str, response_ids: Sequence[str], *arguments: float
    ) -> Any:
        """Returns the script's replies for responses, also if it knows none of them."""
        # the same reads and the same time for what is no id as for an unknown one
        ids = [each if is_response_id(each) else "" for each in response_ids]
        for is_last in (False, True):
            keys = {(tenant.tenant_id, each) for each in ids} & self._pending.keys()
            if keys:
                await asyncio.wait({self._pending[key] for key in keys})
            found = await self._store.evaluate(
                script, response_keys(tenant.tenant_id), [*ids, *arguments]
            )
            is_known = found not in (None, 0, b"unknown")
            if is_last or (is_known and not (isinstance(found, list) and None in found)):
                break
            await self._clock.sleep(READ_AGAIN_S)
        return found

    async def _save(self, tenant: TenantRecord, record: ResponseRecord) -> None:
        try:
            outcome = "more"
            while outcome == "more":
                outcome, num_evicted = await self._store_once(tenant, record)
                for _ in range(num_evicted):
                    self._count("evicted")
        except StoreUnavailable as error:
            self._count("failed")
            log.warning("response_not_stored", response=record.id, reason=error.message)
            return
        finally:
            self._num_pending_bytes -= record.num_bytes
            del self._pending[tenant.tenant_id, record.id]
        if outcome == "forbidden":
            self._refuse(tenant)
        else:
            self._count(outcome)

    def _refuse(self, tenant: TenantRecord) -> None:
        """Counts and records that a response is not stored, which its client has by then."""
        self._count("forbidden")
        late_refusal(tenant.tenant_id, "a response", self._on_refused)

    async def _store_once(self, tenant: TenantRecord, record: ResponseRecord) -> tuple[str, int]:
        """Returns the outcome and the number of evicted records. Raises StoreUnavailable."""
        store = self._bulk if record.num_bytes > MAX_PART_BYTES else self._store
        outcome, num_evicted = await store.evaluate(
            scripts.SAVE,
            [*response_keys(tenant.tenant_id), *RECORD_KEYS],
            [
                *(record.id, msgspec.msgpack.encode(record), record.previous),
                *(max(1, int(self._ttl_s)), self._now(), self._max_bytes),
                *(tenant.tenant_id, self._region, self._max_all_bytes(), self._classes),
                tenant.created_at,
            ],
        )
        return outcome.decode(), num_evicted


def _known(response_id: str, size: int | None, param: str) -> StoredSize:
    if size is None:
        raise UnknownResponse(UNKNOWN, param=param)
    return StoredSize(response_id, size)


def _parts(responses: Sequence[StoredSize]) -> Iterator[list[StoredSize]]:
    """Returns parts of at most MAX_PART_BYTES, or of one record."""
    part: list[StoredSize] = []
    num_bytes = 0
    for each in responses:
        if part and num_bytes + each.num_bytes > MAX_PART_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(each)
        num_bytes += each.num_bytes
    if part:
        yield part
