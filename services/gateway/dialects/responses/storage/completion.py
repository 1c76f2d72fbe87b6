"""Finds the stored state that a body refers to, and reads it within the tenant's body bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from services.gateway.dialects.responses.storage.record import PREVIOUS, TenantState
from services.gateway.dialects.responses.storage.references import (
    KIND,
    References,
    StoredState,
    has_references,
    merged,
    references_of,
)
from services.gateway.dialects.responses.storage.seal import Seal
from services.gateway.dialects.responses.storage.store import ResponseStore, StoredSize
from services.gateway.request.endpoint import EndpointState, Scan
from shared.errors import InvalidRequest, PayloadTooLarge
from shared.tenancy.tenant import TenantRecord
from shared.transport.wire_errors import UNREADABLE

MAX_BYTES = 4 << 20
MAX_REFERENCED = 64  # responses of which one body names items
OWN_FIELDS = ("hearth_history", "hearth_input", "hearth_tools")


class _BodyHead(msgspec.Struct, frozen=True):
    previous_response_id: str | None = None
    store: bool | None = None
    hearth_history: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    hearth_input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    hearth_tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_head_decoder = msgspec.json.Decoder(_BodyHead)
_references_decoder = msgspec.json.Decoder(References)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class StoredReferences:
    """The stored state that a body refers to, before any of it is read. An
    `EndpointState.Referred`.
    """

    store: ResponseStore
    tenant: TenantRecord
    chain: Sequence[StoredSize]
    referenced: Sequence[StoredSize]
    opened: dict[str, str]
    max_bytes: int

    @property
    def num_bytes(self) -> int:
        stored = sum(each.num_bytes for each in (*self.chain, *self.referenced))
        return stored + sum(len(each.encode()) for each in self.opened.values())

    def merge(self, body: bytes, state: bytes) -> bytes:
        return merged(body, state)

    async def read(self, hold: Callable[[int], None]) -> bytes:
        """Returns the encoded state. Raises UnknownResponse, StoreUnavailable, and what `hold`
        raises.
        """
        hold(self.num_bytes)
        chain = await self.store.read(self.tenant, self.chain, PREVIOUS)
        found = await self.store.read(self.tenant, self.referenced, "input")
        return _encode(
            StoredState(
                chain=chain,
                referenced={
                    each.id: data for each, data in zip(self.referenced, found, strict=True)
                },
                opened=self.opened,
                max_bytes=self.max_bytes,
            )
        )


class BodyCompletion:
    """`seal`: encrypts reasoning; None: it is not encrypted. `max_bytes`: of a body with the state
    that it refers to.
    """

    def __init__(self, store: ResponseStore, seal: Seal | None, max_bytes: int = MAX_BYTES) -> None:
        self._store = store
        self._seal = seal
        self._max_bytes = max_bytes

    @property
    def state(self) -> EndpointState:
        return EndpointState(of_tenant=self.of_tenant, referred=self.referred)

    def of_tenant(self, tenant: TenantRecord) -> TenantState:
        save = partial(self._store.save, tenant) if self._store.may_store(tenant) else None
        seal = None if self._seal is None else partial(self._seal.seal, tenant.tenant_id)
        return TenantState(save=save, seal=seal)

    async def referred(
        self, tenant: TenantRecord, data: bytes, scan: Scan
    ) -> StoredReferences | None:
        """`scan`: of a large body, elsewhere. None: it refers to nothing; also for a body that
        cannot be decoded: its decoder names the field. Raises InvalidRequest, UnknownResponse,
        PayloadTooLarge, ZeroRetentionRejected, NoRegionAllowed, and StoreUnavailable if Redis is
        needed and does not answer.
        """
        try:
            head = _head_decoder.decode(data)
        except UNREADABLE:
            return None
        for name in OWN_FIELDS:
            if getattr(head, name) is not msgspec.UNSET:
                raise InvalidRequest(f"{name}: a request cannot set this field", param=name)
        previous = head.previous_response_id
        if head.store:
            self._store.check_may_store(tenant, "store")
            if previous is None:
                await self._store.check_available(tenant)
        chain = [] if previous is None else await self._store.chain(tenant, previous)
        references = await self._references(data, scan) if has_references(data) else References()
        return self._bounded(
            data,
            StoredReferences(
                store=self._store,
                tenant=tenant,
                chain=chain,
                referenced=await self._referenced(tenant, references),
                opened=self._opened(tenant, references),
                max_bytes=self._max_bytes,
            ),
        )

    async def _references(self, data: bytes, scan: Scan) -> References:
        found = await scan(KIND)
        return references_of(data) if found is None else _references_decoder.decode(found)

    async def _referenced(
        self, tenant: TenantRecord, references: References
    ) -> Sequence[StoredSize]:
        params = references.params
        if len(params) > MAX_REFERENCED:
            message = f"input: items of more than {MAX_REFERENCED} responses"
            raise PayloadTooLarge(message, param="input")
        return await self._store.sizes(tenant, params) if params else []

    def _opened(self, tenant: TenantRecord, references: References) -> dict[str, str]:
        if self._seal is None:
            return {}
        opened = {each: self._seal.open(tenant.tenant_id, each) for each in references.sealed}
        return {each: text for each, text in opened.items() if text is not None}

    def _bounded(self, data: bytes, referred: StoredReferences) -> StoredReferences | None:
        if not referred.num_bytes:
            return None
        if len(data) + referred.num_bytes > self._max_bytes:
            param = PREVIOUS if referred.chain else "input"
            raise PayloadTooLarge(
                f"{param}: the body with what it refers to is larger than {self._max_bytes} bytes",
                param=param,
            )
        return referred
