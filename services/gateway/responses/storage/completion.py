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
from services.gateway.responses.ids import response_of_item
from services.gateway.responses.storage.errors import UnknownResponse
from services.gateway.responses.storage.record import (
    ResponseRecord,
    TenantState,
    input_items_of,
    items_of,
    output_items_of,
)
from services.gateway.responses.storage.seal import PREFIX, Seal
from services.gateway.responses.storage.store import PREVIOUS, ResponseStore
from shared.errors import InvalidRequest, PayloadTooLarge
from shared.tenancy.tenant import TenantRecord

MAX_REFERENCED = 64  # responses of which one body names items
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
    """`seal`: None: reasoning is not sealed."""

    def __init__(self, store: ResponseStore, seal: Seal | None) -> None:
        self._store = store
        self._seal = seal

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
        records: dict[str, ResponseRecord] = {}
        items = []
        for index, raw in enumerate(given):
            encoded = bytes(raw)
            if _REFERENCE in encoded or _SEALED in encoded:
                item = _decoded(encoded)
                kind = item.get("type") if isinstance(item, dict) else None
                if kind == "item_reference":
                    param = f"input[{index}].id"
                    item = await self._referenced(tenant, param, item.get("id"), records)
                elif kind == "reasoning":
                    item = self._opened(tenant, item)
                raw = msgspec.Raw(_encode(item))
            items.append(raw)
        return items

    async def _referenced(
        self, tenant: TenantRecord, param: str, item_id: Any, records: dict[str, ResponseRecord]
    ) -> Any:
        self._store.check_may_store(tenant, param)
        response_id = (response_of_item(item_id) if isinstance(item_id, str) else None) or ""
        if response_id not in records:
            if len(records) >= MAX_REFERENCED:
                raise PayloadTooLarge(
                    f"input: items of more than {MAX_REFERENCED} responses", param="input"
                )
            records[response_id] = await self._store.get(tenant, response_id, param)
        record = records[response_id]
        for item in (*output_items_of(record), *input_items_of(record)):
            if item["id"] == item_id:
                return item
        raise UnknownResponse("there is no item with this id", param=param)

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
