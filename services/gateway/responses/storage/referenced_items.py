"""Items of stored responses that a body names by `item_reference`.

A small body could pull in any amount of stored state: the records that are read and the bytes that
are put in have limits, and a record is decoded once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.responses.ids import response_of_item
from services.gateway.responses.storage.errors import UnknownResponse
from services.gateway.responses.storage.record import (
    ResponseRecord,
    input_items_of,
    output_items_of,
)
from services.gateway.responses.storage.store import ResponseStore
from shared.errors import PayloadTooLarge
from shared.tenancy.tenant import TenantRecord

MAX_REFERENCED = 64  # responses of which one body names items
MAX_READ_BYTES = 16 << 20  # of all their records

_encode = msgspec.json.Encoder().encode


class ReferencedItems:
    """Of one body. `max_bytes`: of the items that are put into it."""

    def __init__(self, store: ResponseStore, tenant: TenantRecord, max_bytes: int) -> None:
        self._store, self._tenant, self._max_bytes = store, tenant, max_bytes
        self._of_response: dict[str, dict[str, msgspec.Raw]] = {}
        self._num_read, self._num_put = 0, 0

    async def get(self, item_id: Any, param: str) -> msgspec.Raw:
        """Raises UnknownResponse, PayloadTooLarge, and what reading the store raises."""
        self._store.check_may_store(self._tenant, param)
        response_id = (response_of_item(item_id) if isinstance(item_id, str) else None) or ""
        items = self._of_response.get(response_id)
        if items is None:
            items = self._of_response[response_id] = await self._read(response_id, param)
        item = items.get(item_id)
        if item is None:
            raise UnknownResponse("there is no item with this id", param=param)
        self._num_put += len(bytes(item))
        if self._num_put > self._max_bytes:
            raise PayloadTooLarge(
                f"input: the items that it refers to are more than {self._max_bytes} bytes",
                param="input",
            )
        return item

    async def _read(self, response_id: str, param: str) -> dict[str, msgspec.Raw]:
        if len(self._of_response) >= MAX_REFERENCED:
            raise PayloadTooLarge(
                f"input: items of more than {MAX_REFERENCED} responses", param="input"
            )
        record = await self._store.get(self._tenant, response_id, param)
        self._num_read += len(record.input) + len(record.response)
        if self._num_read > MAX_READ_BYTES:
            raise PayloadTooLarge(
                f"input: the responses that it refers to are more than {MAX_READ_BYTES >> 20} MiB",
                param="input",
            )
        return _items_by_id(record)


def _items_by_id(record: ResponseRecord) -> dict[str, msgspec.Raw]:
    """Encoded. An id of both is the output's."""
    items = (*input_items_of(record), *output_items_of(record))
    return {item["id"]: msgspec.Raw(_encode(item)) for item in items}
