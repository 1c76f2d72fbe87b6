"""Completes a body before it is decoded: what it refers to is put into it.

previous_response_id    the items of the response and of those before it, as `hearth_history`
item_reference          the item, in its place
encrypted_content       the text of reasoning that this cluster sealed, in its place
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from services.gateway.request.endpoint import EndpointState
from services.gateway.request.supported_fields import check_count
from services.gateway.responses.input import MAX_ITEMS
from services.gateway.responses.storage.record import TenantState, items_of
from services.gateway.responses.storage.referenced_items import ReferencedItems
from services.gateway.responses.storage.seal import PREFIX, Seal
from services.gateway.responses.storage.store import PREVIOUS, ResponseStore
from shared.errors import InvalidRequest
from shared.tenancy.tenant import TenantRecord

MAX_BYTES = 4 << 20
OWN_FIELDS = ("hearth_history", "hearth_input")
_REFERENCE = b"item_reference"
_SEALED = PREFIX.encode()


class _Head(msgspec.Struct, frozen=True):
    previous_response_id: str | None = None
    store: bool | None = None
    hearth_history: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    hearth_input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_head_decoder = msgspec.json.Decoder(_Head)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class Completion:
    """`seal`: None: reasoning is not sealed. `max_bytes`: of the items that bodies refer to."""

    def __init__(self, store: ResponseStore, seal: Seal | None, max_bytes: int = MAX_BYTES) -> None:
        self._store = store
        self._seal = seal
        self._max_bytes = max_bytes

    @property
    def state(self) -> EndpointState:
        return EndpointState(complete=self.complete, of_tenant=self.of_tenant)

    def of_tenant(self, tenant: TenantRecord) -> TenantState:
        save = partial(self._store.save, tenant) if self._store.may_store(tenant) else None
        seal = None if self._seal is None else partial(self._seal.seal, tenant.tenant_id)
        return TenantState(save=save, seal=seal)

    async def complete(self, tenant: TenantRecord, data: bytes) -> bytes:
        """A body that cannot be decoded is returned as it is: its decoder names the field. Raises
        InvalidRequest, UnknownResponse, PayloadTooLarge, ZeroRetentionRejected, NoRegionAllowed,
        and StoreUnavailable if Redis is needed and does not answer.
        """
        try:
            head = _head_decoder.decode(data)
        except _UNREADABLE:
            return data
        for name in OWN_FIELDS:
            if getattr(head, name) is not msgspec.UNSET:
                raise InvalidRequest(f"{name}: a request cannot set this field", param=name)
        has_items = _REFERENCE in data or (self._seal is not None and _SEALED in data)
        if head.store:
            self._store.check_may_store(tenant, "store")
        if head.previous_response_id is not None:
            self._store.check_may_store(tenant, PREVIOUS)
        elif head.store:
            await self._store.check_available(tenant)
        if head.previous_response_id is None and not has_items:
            return data
        return await self._completed(tenant, data, head.previous_response_id, has_items)

    async def _completed(
        self, tenant: TenantRecord, data: bytes, previous: str | None, has_items: bool
    ) -> bytes:
        try:
            fields = _fields_decoder.decode(data)
        except _UNREADABLE as error:  # a name that is no text
            raise InvalidRequest(f"the body is not valid JSON: {error}") from error
        given = _listed(fields.get("input")) if has_items else None
        if given is not None:
            fields["input"] = msgspec.Raw(_encode(await self._items(tenant, given)))
        if previous is not None:
            chain = await self._store.chain(tenant, previous)
            history = [item for record in chain for item in items_of(record)]
            fields["hearth_history"] = msgspec.Raw(_encode(history))
        return _encode(fields)

    async def _items(self, tenant: TenantRecord, given: list[msgspec.Raw]) -> list[msgspec.Raw]:
        check_count("input", len(given), MAX_ITEMS)  # before any item is read from the store
        referenced = ReferencedItems(self._store, tenant, self._max_bytes)
        return [
            await self._item(tenant, f"input[{index}].id", raw, referenced)
            for index, raw in enumerate(given)
        ]

    async def _item(
        self, tenant: TenantRecord, param: str, raw: msgspec.Raw, referenced: ReferencedItems
    ) -> msgspec.Raw:
        encoded = bytes(raw)
        if _REFERENCE not in encoded and _SEALED not in encoded:
            return raw
        item = _decoded(encoded)
        match item:
            case {"type": "item_reference"}:
                return await referenced.get(item.get("id"), param)
            case {"type": "reasoning"}:
                return msgspec.Raw(_encode(self._opened(tenant, item)))
        return raw

    def _opened(self, tenant: TenantRecord, item: dict[str, Any]) -> dict[str, Any]:
        sealed = item.get("encrypted_content")
        if self._seal is None or item.get("content") or not isinstance(sealed, str):
            return item
        text = self._seal.open(tenant.tenant_id, sealed)
        if text is None:
            return item
        return {**item, "content": [{"type": "reasoning_text", "text": text}]}


def _listed(given: msgspec.Raw | None) -> list[msgspec.Raw] | None:
    """None for an input that is not a list."""
    try:
        return None if given is None else _items_decoder.decode(given)
    except _UNREADABLE:
        return None


def _decoded(encoded: bytes) -> Any:
    """An item that cannot be decoded is refused later, by name."""
    try:
        return msgspec.json.decode(encoded)
    except _UNREADABLE:
        return msgspec.Raw(encoded)
