"""Requests are charged before they are decoded, and large bodies are prepared in a process."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.gateway.dialects import admission
from services.gateway.request import prepared_bodies
from services.gateway.request.supported_fields import SupportedFields
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT
from tests.services.gateway.dialects.openai.test_refusals import check_envelope
from tests.services.gateway.tenancy.test_limits_http import (
    COMPLETIONS,
    EMBEDDINGS,
    KEY,
    Acme,
    acme,
)
from tests.support.waiting import until

__all__ = ["acme"]

SYSTEM = "the quick brown fox jumps over the lazy dog " * 4
TOO_LONG = {"messages": [{"role": "user", "content": "x" * 50_000}]}
REJECTED: list[tuple[str, str, bytes, int]] = [
    ("POST", CHAT, b"{", 400),
    ("POST", CHAT, b"", 400),
    ("POST", CHAT, b" " * (64 * 1024 + 1), 413),
    ("POST", CHAT, json.dumps(TOO_LONG).encode(), 400),
    ("POST", CHAT, json.dumps({**BODY, "tools": [{}]}).encode(), 400),
    ("POST", CHAT, json.dumps({**BODY, "messages": [{"role": "assistant"}]}).encode(), 400),
    ("POST", COMPLETIONS, b'{"prompt": [[]]}', 400),
    ("POST", EMBEDDINGS, b'{"input": "a", "dimensions": 3}', 400),
    ("POST", "/v1/prefixes/dry_run", b'{"request": {}}', 400),
    ("PUT", "/v1/prefixes/short", b"{}", 400),
    ("POST", "/tokenize", b"{", 400),
    ("POST", "/v1/detokenize", b" " * (64 * 1024 + 1), 413),
    ("GET", "/v1/prefixes/none", b"", 404),
    ("DELETE", "/v1/prefixes/none", b"", 404),
]


async def test_every_rejected_request_is_charged(acme: Acme) -> None:
    began = time.monotonic()
    await acme.configure(requests_per_min=60, concurrency=1)
    for number, (method, path, body, status) in enumerate(REJECTED, 1):
        headers = {"content-type": "application/json"}
        response = await acme.http.request(method, path, content=body, headers=headers)
        assert response.status_code == status, (path, response.text)
        remaining = int(response.headers["x-ratelimit-remaining-requests"])
        refilled = time.monotonic() - began  # one a second
        assert 60 - number <= remaining <= 60 - number + refilled, path
    assert (await acme.post_chat()).status_code == 200  # no rejected request holds its place
    await until(lambda: not acme.cluster.gateway._limits.num_open)


async def test_exhausted_tenant_costs_no_work(acme: Acme, monkeypatch: Any) -> None:
    """Its bodies are not even read, on no route that renders, tokenizes or writes."""
    await acme.configure(requests_per_min=1)
    assert (await acme.post_chat()).status_code == 200
    monkeypatch.setattr(admission.Admission, "_read", None)
    for method, path, body, _ in REJECTED:
        response = await acme.http.request(method, path, content=body)
        check_envelope(response, 429, "requests_per_min_exceeded", None)
    assert (await acme.http.get("/v1/models")).status_code == 200


async def test_prefix_write_costs_its_tokens(acme: Acme) -> None:
    await acme.configure(requests_per_min=60, input_tokens_per_min=100)
    response = await acme.http.put("/v1/prefixes/a", json={"system": SYSTEM})
    assert response.status_code == 200, response.text
    num_tokens = response.json()["num_tokens"]
    assert num_tokens > 50
    assert int(response.headers["x-ratelimit-remaining-tokens"]) == 100 - num_tokens
    again = await acme.http.put("/v1/prefixes/b", json={"system": SYSTEM})
    check_envelope(again, 429, "input_tokens_per_min_exceeded", None)
    assert [each["name"] for each in (await acme.http.get("/v1/prefixes")).json()["data"]] == ["a"]


@pytest.mark.parametrize("inline_bytes", [prepared_bodies.MAX_INLINE_BYTES, 1])
async def test_prefix_that_cannot_fit_is_rejected_by_its_characters(
    acme: Acme, monkeypatch: Any, inline_bytes: int
) -> None:
    await acme.configure(input_tokens_per_min=10)
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", inline_bytes)
    for num_chars, status, code in ((50_000, 400, "context_length_exceeded"),
                                    (1_000, 400, "exceeds_limit")):  # fmt: skip
        response = await acme.http.put("/v1/prefixes/a", json={"system": "x" * num_chars})
        check_envelope(response, status, code, "messages")
        assert "at least" in response.json()["error"]["message"]


LARGE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**BODY, "logprobs": True, "logit_bias": {"7": 1.5}, "stop": ["zzz"], "seed": 1}),
    (COMPLETIONS, {"prompt": ["hello", "the fox"], "max_tokens": 5, "echo": True, "seed": 1}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 5, "echo": True, "logprobs": 1, "seed": 1}),
    (EMBEDDINGS, {"input": [[5, 6], [7]]}),
    ("/v1/prefixes/dry_run", {"request": BODY, "other": {"prompt": "hello"}}),
]


async def test_large_body_has_the_same_response(acme: Acme, monkeypatch: Any) -> None:
    """Prepared in a process as inline; only ids and times differ."""
    await acme.configure()
    for path, body in LARGE:
        replies = []
        for limit in (prepared_bodies.MAX_INLINE_BYTES, 1):
            monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", limit)
            response = await acme.http.post(path, json=body)
            assert response.status_code == 200, (path, response.text)
            reply = response.json()
            replies.append({key: reply[key] for key in reply.keys() - {"id", "created", "hearth"}})
            monkeypatch.undo()
        assert replies[0] == replies[1], path


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/JSON", "a/b"])
async def test_large_body_of_any_type_is_decoded_in_a_process(
    acme: Acme, monkeypatch: Any, kind: str
) -> None:
    """The route reads every body as JSON, whatever its type."""
    await acme.configure()
    sizes: list[int] = []
    decode = SupportedFields.decode

    def counted(fields: SupportedFields, data: bytes) -> Any:
        sizes.append(len(data))
        return decode(fields, data)

    monkeypatch.setattr(SupportedFields, "decode", counted)
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", 8192)
    content = json.dumps({**BODY, "unknown": "x" * 8192}).encode()
    response = await acme.http.post(CHAT, content=content, headers={"content-type": kind})
    assert response.status_code == 200
    assert not sizes or max(sizes) < len(content)


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


PROMPT = json.dumps({"prompt": "hello"})
BOMB = gzipped(b" " * 50_000_000)
NOTHING = zlib.compress(b"")[:2] + b"\x00\x00\x00\xff\xff" * 14_000  # blocks of no bytes
ENCODED: list[tuple[dict[str, str], bytes, int]] = [
    ({"content-encoding": "gzip"}, gzipped(PROMPT.encode()), 200),
    ({"content-encoding": "gzip"}, gzipped(b"  ") + gzipped(PROMPT.encode()), 200),
    ({"content-encoding": "deflate"}, zlib.compress(PROMPT.encode()), 200),
    ({"content-encoding": "identity"}, PROMPT.encode(), 200),
    ({"content-type": 'application/json; charset="UTF-8"'}, PROMPT.encode("utf-8-sig"), 200),
    ({"content-encoding": "gzip"}, gzipped(PROMPT.encode())[:-9], 415),
    ({"content-encoding": "gzip"}, PROMPT.encode(), 415),
    ({"content-encoding": "br"}, PROMPT.encode(), 415),
    ({"content-encoding": "gzip"}, BOMB[:60_000], 413),
    ({"content-encoding": "deflate"}, NOTHING, 413),
    ({"content-encoding": "gzip"}, gzipped(b"") * 15 + gzipped(PROMPT.encode()), 200),
    ({"content-encoding": "gzip"}, gzipped(b"") * 16 + gzipped(PROMPT.encode()), 415),
    ({"content-type": "application/json; charset=utf-16"}, PROMPT.encode("utf-16"), 415),
    ({}, PROMPT.encode("utf-16"), 415),
    ({}, PROMPT.encode("utf-16-le"), 415),
    ({}, PROMPT.encode("utf-32-be"), 415),
    ({"content-type": "application/json; charset=latin-1"}, PROMPT.encode(), 415),
]


async def chunked(content: bytes) -> AsyncIterator[bytes]:
    """Sent without a content-length."""
    yield content


async def test_encodings_of_a_body(acme: Acme) -> None:
    """A body counts as what it becomes; an encoding that is not read is named."""
    await acme.configure()
    for headers, content, status in ENCODED:
        given = {"content-type": "application/json", **headers}
        response = await acme.http.post("/tokenize", content=chunked(content), headers=given)
        assert response.status_code == status, (headers, response.text)
    await until(lambda: not acme.cluster.gateway.transport.budget.num_bytes)


BOUNDS: list[tuple[str, dict[str, Any], int, str, str]] = [
    (CHAT, TOO_LONG, 400, "context_length_exceeded", "messages"),
    (CHAT, {**BODY, "tools": [{}]}, 400, "invalid_request", "tools[0].function"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]},
     413, "", "messages[0].content"),
    (COMPLETIONS, {"prompt": ["a"] * 257}, 413, "", "prompt"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, 413, "", "input"),
]  # fmt: skip


@pytest.mark.parametrize("inline_bytes", [prepared_bodies.MAX_INLINE_BYTES, 1])
async def test_each_bound_names_its_field(acme: Acme, monkeypatch: Any, inline_bytes: int) -> None:
    await acme.configure()
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", inline_bytes)
    for path, body, status, code, param in BOUNDS:
        response = await acme.http.post(path, json=body)
        check_envelope(response, status, code or "payload_too_large", param)


def num_held(num_bytes: int) -> int:
    """How many objects of this process refer to bytes of this length."""
    referents = gc.get_referents(*gc.get_objects())
    return sum(type(each) is bytes and len(each) == num_bytes for each in referents)


async def test_body_is_freed_after_its_response(acme: Acme) -> None:
    """Not by the next request of its connection: each of many connections may hold 4 MiB."""
    await acme.configure()
    url = httpx.URL(acme.cluster.gateway.http_address)
    num_bytes = 48_611
    gc.collect()
    gc.disable()
    try:
        reader, writer = await asyncio.open_connection(url.host, url.port)
        lines = ("POST /tokenize HTTP/1.1", "host: x", f"authorization: Bearer {KEY}",
                 f"content-length: {num_bytes}")  # fmt: skip
        body = json.dumps({"prompt": "hello"}).encode().ljust(num_bytes)
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        del body
        await reader.readuntil(b'"token_strs":null}')
        await until(lambda: not acme.cluster.gateway.transport.budget.num_bytes)
        await until(lambda: not num_held(num_bytes))
        writer.close()
    finally:
        gc.enable()
