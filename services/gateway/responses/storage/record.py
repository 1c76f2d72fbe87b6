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
    """The item in the form of the API, whatever the client left out."""
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
            output = given if isinstance(given, str) else _parts("input_text", given)
            return {**shown, "status": "completed", "output": output}
        case "function_call" | "custom_tool_call":
            return {**shown, "status": "completed"}
        case "reasoning":
            content = _parts("reasoning_text", item.content)
            return {**shown, "summary": _parts("summary_text", item.summary), "content": content}
    return shown


def _parts(kind: str, content: Content | None) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    texts = (part.refusal if part.text is None else part.text for part in content or ())
    return [{"type": kind, "text": text or ""} for text in texts]
