"""What is stored of a response, and of the items that it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.responses.fields import Content, InputItem
from services.gateway.responses.ids import item_id

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
    """What an encoder needs of the gateway. `save`: stores a record, without waiting; None: the
    tenant's responses are not stored. `seal`: seals a text that only this tenant can send back.
    """

    save: Callable[[ResponseRecord], None] | None = None
    seal: Callable[[str], str | None] | None = None


class _Output(msgspec.Struct, frozen=True):
    output: list[msgspec.Raw]


_output_decoder = msgspec.json.Decoder(_Output)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_dict_decoder = msgspec.json.Decoder(list[dict[str, Any]])


def stored_items(items: Sequence[InputItem]) -> bytes:
    return _encode([_stored(item) for item in items])


def items_of(record: ResponseRecord) -> list[msgspec.Raw]:
    """The items of the input and of the output, encoded."""
    output = _output_decoder.decode(record.response).output
    return [*_list_decoder.decode(record.input), *output]


def input_items_of(record: ResponseRecord) -> list[dict[str, Any]]:
    """The items of the input, each with an id."""
    return [
        {**item, "id": item.get("id") or _new_id(record.id, index, item)}
        for index, item in enumerate(_dict_decoder.decode(record.input))
    ]


def output_items_of(record: ResponseRecord) -> list[dict[str, Any]]:
    return [msgspec.json.decode(item) for item in _output_decoder.decode(record.response).output]


def _new_id(response_id: str, index: int, item: dict[str, Any]) -> str:
    prefix = _PREFIXES.get(item.get("type", ""), "item")
    return item_id(prefix, response_id, index, is_input=True)


def _stored(item: InputItem) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": item.type, **msgspec.to_builtins(item)}
    if item.type == "message":
        shown["status"] = "completed"
        shown["content"] = _parts(item.role or "", item.content or "")
    elif item.type in ("function_call", "custom_tool_call"):
        shown["status"] = "completed"
    elif item.type in ("function_call_output", "custom_tool_call_output"):
        shown["status"] = "completed"
        shown["output"] = msgspec.to_builtins(item.output) or ""
    elif item.type == "reasoning":
        shown["summary"] = msgspec.to_builtins(item.summary) or []
    return shown


def _parts(role: str, content: Content) -> list[dict[str, Any]]:
    texts = (
        [content]
        if isinstance(content, str)
        else [(part.refusal if part.text is None else part.text) or "" for part in content]
    )
    if role == "assistant":
        return [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return [{"type": "input_text", "text": text} for text in texts]
