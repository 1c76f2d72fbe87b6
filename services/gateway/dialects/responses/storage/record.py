"""The record of a response in Redis, and its items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.dialects.openai.content_parts import IMAGE_KINDS
from services.gateway.dialects.responses.fields import Content, InputItem, InputPart
from services.gateway.dialects.responses.ids import item_id
from services.gateway.dialects.responses.storage.errors import UnknownResponse
from shared.transport.wire_errors import UNREADABLE

PREVIOUS = "previous_response_id"
UNKNOWN = "there is no response with this id"

NamedItem = tuple[str, msgspec.Raw]  # its id, and the item as JSON

_encode = msgspec.json.Encoder().encode
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


class ResponseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`previous`: the id of the response before it, or empty. `input`: a JSON list of items.
    `response`: the object as JSON.
    """

    id: str
    previous: str = ""
    input: bytes = b"[]"
    response: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.response)


@dataclass(frozen=True, slots=True)
class TenantState:
    """The part of the gateway that an encoder needs. `save`: stores a record without waiting; None:
    the tenant's responses are not stored. `seal`: encrypts a text so that only this tenant can send
    it back.
    """

    save: Callable[[ResponseRecord], None] | None = None
    seal: Callable[[str], str | None] | None = None


class _StoredItems(msgspec.Struct, frozen=True):
    output: list[msgspec.Raw]


class _Named(msgspec.Struct, frozen=True):
    """Decodes the id of an item and skips its other fields."""

    id: str | None = None
    type: str = ""


_output_decoder = msgspec.json.Decoder(_StoredItems)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_named_decoder = msgspec.json.Decoder(_Named)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_record_decoder = msgspec.msgpack.Decoder(ResponseRecord)


def stored_items(items: Sequence[InputItem]) -> bytes:
    return _encode([_stored(item) for item in items])


def decoded_record(data: bytes, param: str) -> ResponseRecord:
    """Returns the record. Raises UnknownResponse for an unreadable one."""
    try:
        return _record_decoder.decode(data)
    except UNREADABLE as error:
        raise UnknownResponse(UNKNOWN, param=param) from error


def items_of(record: ResponseRecord) -> list[msgspec.Raw]:
    """Returns the encoded items of the input and of the output."""
    output = _output_decoder.decode(record.response).output
    return [*_list_decoder.decode(record.input), *output]


def named_items_of(record: ResponseRecord) -> dict[str, msgspec.Raw]:
    """Returns the same items by their ids. An id that both have is that of the output's item."""
    output = _output_decoder.decode(record.response).output
    named = {_named_decoder.decode(item).id or "": item for item in output}
    return {**dict(input_items_of(record)), **named}


def input_items_of(record: ResponseRecord) -> list[NamedItem]:
    """Returns the ids of the input's items with the encoded items."""
    return [
        _with_id(record.id, index, item)
        for index, item in enumerate(_list_decoder.decode(record.input))
    ]


def _with_id(response_id: str, index: int, item: msgspec.Raw) -> NamedItem:
    named = _named_decoder.decode(item)
    if named.id:
        return named.id, item
    prefix = _PREFIXES.get(named.type, "item")
    new_id = item_id(prefix, response_id, index, is_input=True)
    fields = {**_fields_decoder.decode(item), "id": msgspec.Raw(_encode(new_id))}
    return new_id, msgspec.Raw(_encode(fields))


def _stored(item: InputItem) -> dict[str, Any]:
    """Returns the item in the form of the API, with the fields that the client left out."""
    shown: dict[str, Any] = {"type": item.type, **msgspec.to_builtins(item)}
    match item.type:
        case "message":
            is_answer = item.role == "assistant"
            parts = _parts("output_text" if is_answer else "input_text", item.content)
            if is_answer:
                parts = [{**each, "annotations": []} for each in parts]
            return {**shown, "status": "completed", "content": parts}
        case "function_call_output" | "custom_tool_call_output":
            given = item.output or ""
            output = _parts("input_text", given) if isinstance(given, list) else given
            return {**shown, "status": "completed", "output": output}
        case "function_call" | "custom_tool_call":
            return {**shown, "status": "completed"}
        case "reasoning":
            content = _parts("reasoning_text", item.content)
            # An item that the model does not see costs no tokens, so its storage would be free.
            shown.pop("encrypted_content", None)
            return {**shown, "summary": [], "content": content}
    return shown


def _parts(kind: str, content: Content | None) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    return [_stored_part(kind, part) for part in content or ()]


def _stored_part(kind: str, part: InputPart) -> dict[str, Any]:
    if part.type in IMAGE_KINDS:
        return {**msgspec.to_builtins(part), "type": "input_image"}
    return {"type": kind, "text": (part.refusal if part.text is None else part.text) or ""}
