"""An attacker's requests, with bodies that are costly to decode, render, generate or store.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from benchmarks.stop_strings import COSTLY
from services.gateway.dialects.responses.ids import item_id, response_id
from services.gateway.dialects.responses.storage.record import ResponseRecord

MIB = 1 << 20
MAX_BODY_BYTES = 4 * MIB  # the gateway's default
INLINE_BYTES = 250_000  # below the size from which a preparation process decodes a body
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
PREFIX = "/v1/prefixes/"
NUM_PREFIXES = 120
NUM_STREAMS = 1000
NUM_STORED, STORED_BYTES = 4, 900_000
NUM_CHOICES = 128
STEERED_TOKEN = "70"  # "a" in the demo model's vocabulary
# As the marks with which a template's process refers to literal text, and as a role mark.
MARKS = ("\ufdd099999\ufdd1", "<|im_start|>system", "\ufdd0", "\ufdd1")
UNITS = (b"[]", b"{}", b"0", b'""', b"[[]]", b'{"a":[]}', b'{"role":"user","content":"a"}')
OPENINGS = (b"[", b'{"a":')
FIELDS = ((CHAT, b"tools"), (CHAT, b"messages"), (COMPLETIONS, b"prompt"), (CHAT, b"unknown"))


class Attack(msgspec.Struct, frozen=True):
    method: str
    path: str
    body: bytes

    def message(self, host: str, api_key: str) -> bytes:
        head = (
            f"{self.method} {self.path} HTTP/1.1\r\nhost: {host}\r\n"
            f"authorization: Bearer {api_key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(self.body)}\r\n\r\n"
        )
        return head.encode() + self.body


def chats() -> list[Attack]:
    """Returns chats larger than a body may be; as large; and large ones of which the
    prompt nearly fits.
    """
    texts = ("x" * (8 * MIB), "word " * (MAX_BODY_BYTES // 5 - 50), "a b c " * 50_000)
    turns = [{"role": "user", "content": "word " * 12}] * 4000
    return [
        *(_post(CHAT, {"messages": [{"role": "user", "content": text}]}) for text in texts),
        _post(CHAT, {"messages": turns, "max_tokens": 1}),
    ]


def nested() -> list[Attack]:
    """Returns bodies with wide and deep values in each field, as large as a body may
    be, inline or not.
    """
    attacks = []
    for size in (MAX_BODY_BYTES - 100, INLINE_BYTES):
        for path, field in FIELDS:
            for value in (*(_wide(each, size) for each in UNITS), *_deep(size)):
                attacks.append(Attack("POST", path, b'{"' + field + b'":' + value + b"}"))
    return attacks


def marks() -> list[Attack]:
    """Tools whose keys and values are marks of the renderer and of the template."""
    tools = [_tool(mark) for mark in MARKS]
    return [
        _put(f"marked-{index}", {"system": "be brief " * 20, "tools": chosen})
        for index, chosen in enumerate([*([each] for each in tools), tools, [_many(MARKS[0])]])
    ]


def stops() -> list[Attack]:
    """Returns requests with many choices, of which each output is the start of many
    long stop strings.
    """
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    sampling = {"n": NUM_CHOICES, "max_tokens": 256, "ignore_eos": True, "temperature": 1.0}
    return [_post(CHAT, {**body, **sampling, "stop": COSTLY, "logit_bias": {STEERED_TOKEN: 100}})]


def prefixes() -> list[Attack]:
    """Returns more prefixes than a tenant may have, of several thousand tokens each."""
    return [
        _put(f"prefix-{index}", {"system": f"{index} " + "word and word " * 1200})
        for index in range(NUM_PREFIXES)
    ]


def padded_prefixes() -> list[Attack]:
    """Prefixes of few tokens with fields that the template does not render."""
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "word " * 40, "name": "n" * MIB}]},
        {"messages": [{"role": "user", "content": "word " * 40, "unknown": "n" * MIB}]},
        {"system": "word " * 40, "tools": [{"type": "function", "extra": "n" * (3 * MIB)}]},
    ]
    return [_put(f"padded-{index}", each) for index, each in enumerate(bodies)]


def rejected() -> list[Attack]:
    """Returns one request of each kind that the gateway rejects for its size, form or content."""
    return [*chats()[:3], *nested()[::6], *padded_prefixes()[:1], _put("short", {})]


def streams() -> list[Attack]:
    """Returns as many short streams as one tenant may have at once: more than a gateway
    prepares.
    """
    bodies = (
        {"messages": [{"role": "user", "content": f"Is {number} a prime?"}], "stream": True}
        for number in range(NUM_STREAMS)
    )
    return [_post(CHAT, {**each, "max_tokens": 4, "ignore_eos": True}) for each in bodies]


def continued() -> list[Attack]:
    """Returns small bodies that refer to stored responses of megabytes: those of
    `stored_records`.
    """
    last = response_id(f"stored-{NUM_STORED - 1}")
    item = item_id("rs", response_id("stored-0"), 0)
    reference = {"type": "item_reference", "id": item}
    return [
        _post(RESPONSES, {"input": "go on", "previous_response_id": last, "max_output_tokens": 4}),
        _post(RESPONSES, {"input": [reference] * 4000, "max_output_tokens": 4}),
        _post(RESPONSES, {"input": [reference] * 4, "max_output_tokens": 4}),
        Attack("GET", f"{RESPONSES}/{last}/input_items", b""),
    ]


def stored_records() -> list[ResponseRecord]:
    """Returns a chain of responses, nearly as large as a body may be, and of few tokens."""
    records, previous = [], ""
    for number in range(NUM_STORED):
        own = response_id(f"stored-{number}")
        item = {"type": "reasoning", "id": item_id("rs", own, 0), "summary": []}
        output = [{**item, "encrypted_content": "x" * STORED_BYTES}]
        response = msgspec.json.encode({"id": own, "output": output})
        records.append(ResponseRecord(id=own, previous=previous, response=response))
        previous = own
    return records


def messages() -> list[Attack]:
    """Returns many messages in a body that is small enough to be decoded by the gateway itself."""
    turns = [{"role": "user", "content": "word word word word word word word"}] * 2300
    return [_post(CHAT, {"messages": turns, "max_tokens": 1})]


KINDS: dict[str, Callable[[], list[Attack]]] = {
    "chats": chats,
    "nested": nested,
    "marks": marks,
    "stops": stops,
    "prefixes": lambda: prefixes() + padded_prefixes(),
    "rejected": rejected,
    "streams": streams,
    "continued": continued,
    "messages": messages,
}


def unread(num_choices: int, num_tokens: int, num_logprobs: int, *, stream: bool) -> Attack:
    """Returns a request for a large response."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "n": num_choices,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "logprobs": True,
        "top_logprobs": num_logprobs,
        "stream": stream,
    }
    return _post(CHAT, body)


def _post(path: str, body: dict[str, Any]) -> Attack:
    return Attack("POST", path, msgspec.json.encode(body))


def _put(name: str, body: dict[str, Any]) -> Attack:
    return Attack("PUT", PREFIX + name, msgspec.json.encode(body))


def _tool(mark: str) -> dict[str, Any]:
    return {"type": "function", mark: {mark: mark}, "function": {"name": mark, mark: [mark]}}


def _many(mark: str) -> dict[str, Any]:
    return {f"{mark}{index}": f"{mark}{index}" for index in range(4000)}


def _wide(unit: bytes, size: int) -> bytes:
    return b"[" + b",".join([unit] * (size // (len(unit) + 1))) + b"]"


def _deep(size: int) -> Iterable[bytes]:
    return (opening * (size // len(opening)) for opening in OPENINGS)
