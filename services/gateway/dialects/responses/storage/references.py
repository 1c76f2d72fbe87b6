"""What a body refers to, and the body with what was stored of it. Pure.

previous_response_id    the items of the response and of those before it, as `hearth_history`
item_reference          the item, in its place
encrypted_content       the text of reasoning that this cluster sealed, in its place
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from services.gateway.dialects.responses.ids import response_of_item
from services.gateway.dialects.responses.input import MAX_ITEMS
from services.gateway.dialects.responses.storage.errors import UnknownResponse
from services.gateway.dialects.responses.storage.record import (
    PREVIOUS,
    decoded_record,
    items_of,
    named_items_of,
)
from services.gateway.dialects.responses.storage.seal import PREFIX
from services.gateway.request.supported_fields import check_count
from shared.errors import InvalidRequest, PayloadTooLarge
from shared.transport.wire_errors import UNREADABLE

KIND = "responses_references"  # a kind of job for preparation processes
REFERENCE = b"item_reference"
SEALED = PREFIX.encode()
_MAX_ID_BYTES = 1024
_NO_CONTENT = (b"null", b'""', b"[]")


class References(msgspec.Struct, frozen=True):
    """`items`: of `item_reference`, the ids by their index in `input`. `sealed`: of reasoning."""

    items: dict[int, str] = {}
    sealed: list[str] = []

    @property
    def params(self) -> dict[str, str]:
        """Returns the first place that names each response whose items are referred to."""
        params: dict[str, str] = {}
        for index, item_id in self.items.items():
            params.setdefault(response_of_item(item_id) or "", f"input[{index}].id")
        return params


class StoredState(msgspec.Struct, frozen=True, kw_only=True):
    """`chain`: encoded records of the responses before, oldest first. `referenced`: those whose
    items are named. `opened`: the texts of what was sealed. `max_bytes`: of the items named.
    """

    chain: list[bytes] = []
    referenced: dict[str, bytes] = {}
    opened: dict[str, str] = {}
    max_bytes: int = 0


class _Item(msgspec.Struct, frozen=True):
    """Decodes the few values that are needed, and skips the others, however large they are."""

    type: msgspec.Raw = msgspec.Raw(b"null")
    id: msgspec.Raw = msgspec.Raw(b"null")
    content: msgspec.Raw = msgspec.Raw(b"null")
    encrypted_content: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def reference(self) -> str | None:
        """Returns the id that an `item_reference` names; empty for none."""
        if bytes(self.type) != b'"item_reference"':
            return None
        return _text(self.id) if len(bytes(self.id)) <= _MAX_ID_BYTES else ""

    @property
    def sealed(self) -> str:
        """Returns the encrypted text of reasoning that has no other text; else an empty text."""
        is_reasoning = bytes(self.type) == b'"reasoning"' and bytes(self.content) in _NO_CONTENT
        text = _text(self.encrypted_content) if is_reasoning else ""
        return text if text.startswith(PREFIX) else ""


_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_item_decoder = msgspec.json.Decoder(_Item)
_text_decoder = msgspec.json.Decoder(str)
_state_decoder = msgspec.msgpack.Decoder(StoredState)
_encode = msgspec.json.Encoder().encode


def has_references(data: bytes) -> bool:
    """Returns whether `references_of` may find references."""
    return REFERENCE in data or SEALED in data


def references_of(data: bytes) -> References:
    """Raises InvalidRequest, also for a name that is no text; PayloadTooLarge for too many items,
    before any of them is read from the store.
    """
    found = References({}, [])
    items = _listed(_fields(data).get("input"))
    check_count("input", len(items), MAX_ITEMS)
    for index, raw in enumerate(items):
        item = _item(raw)
        if item.reference is not None:
            found.items[index] = item.reference
        elif item.sealed:
            found.sealed.append(item.sealed)
    return found


def encoded_references(data: bytes) -> bytes:
    return _encode(references_of(data))


def merged(data: bytes, encoded_state: bytes) -> bytes:
    """Returns the body with the stored state. Raises UnknownResponse and PayloadTooLarge."""
    state, fields = _state_decoder.decode(encoded_state), _fields(data)
    if state.referenced or state.opened:
        items = _listed(fields["input"])
        fields["input"] = msgspec.Raw(_encode(_merged_items(items, state)))
    if state.chain:
        records = (decoded_record(each, PREVIOUS) for each in state.chain)
        history = [item for record in records for item in items_of(record)]
        fields["hearth_history"] = msgspec.Raw(_encode(history))
    return _encode(fields)


def _merged_items(items: Sequence[msgspec.Raw], state: StoredState) -> list[msgspec.Raw]:
    known = _Referenced(state)
    return [
        _merged_item(raw, f"input[{index}].id", known, state.opened)
        for index, raw in enumerate(items)
    ]


def _merged_item(
    raw: msgspec.Raw, param: str, known: _Referenced, opened: Mapping[str, str]
) -> msgspec.Raw:
    item = _item(raw)
    if item.reference is not None:
        return known.item(item.reference, param)
    text = opened.get(item.sealed)
    if text is None:
        return raw
    content = _encode([{"type": "reasoning_text", "text": text}])
    return msgspec.Raw(_encode({**_fields_decoder.decode(raw), "content": msgspec.Raw(content)}))


class _Referenced:
    """Finds items by id. Decodes each record once, and limits the bytes that are inserted."""

    def __init__(self, state: StoredState) -> None:
        self._state = state
        self._of_response: dict[str, dict[str, msgspec.Raw]] = {}
        self._num_bytes = 0

    def item(self, item_id: str, param: str) -> msgspec.Raw:
        response_id = response_of_item(item_id) or ""
        if response_id not in self._of_response and response_id in self._state.referenced:
            record = decoded_record(self._state.referenced[response_id], param)
            self._of_response[response_id] = named_items_of(record)
        item = self._of_response.get(response_id, {}).get(item_id)
        if item is None:
            raise UnknownResponse("there is no item with this id", param=param)
        self._num_bytes += len(bytes(item))
        if self._num_bytes > self._state.max_bytes:
            limit = self._state.max_bytes
            message = f"input: the items that it refers to are more than {limit} bytes"
            raise PayloadTooLarge(message, param="input")
        return item


def _fields(data: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _fields_decoder.decode(data)
    except UNREADABLE as error:  # a name that is no text
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def _listed(given: msgspec.Raw | None) -> list[msgspec.Raw]:
    """Returns no items for an input that is not a list."""
    try:
        return [] if given is None else _items_decoder.decode(given)
    except UNREADABLE:
        return []


def _item(raw: msgspec.Raw) -> _Item:
    """Returns an item without references for one that cannot be decoded: the body's decoder rejects
    it later and names it.
    """
    encoded = bytes(raw)
    if not has_references(encoded):
        return _Item()
    try:
        return _item_decoder.decode(encoded)
    except UNREADABLE:
        return _Item()


def _text(raw: msgspec.Raw) -> str:
    """Returns an empty text for a value that is not a text."""
    try:
        return _text_decoder.decode(raw)
    except UNREADABLE:
        return ""
