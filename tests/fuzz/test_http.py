"""Hostile clients of the gateway: bodies of every route, and bytes that are barely HTTP.

Every response is documented in the API, nothing of a request is left, no task failed, and the next
client is served.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import tempfile
import time
from collections.abc import Awaitable
from functools import cache
from pathlib import Path
from typing import Any

import structlog.testing
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http.server import WebServer
from services.gateway.models.model_check import checked_files
from services.gateway.models.preparation_pools import PreparationPools
from services.gateway.service import GatewayService
from services.gateway.structured.tools.family_choice import family_of
from services.gateway.tenancy.stores import GatewayStores
from services.gateway.text.model_files import ModelFiles
from shared.clock import MonotonicClock
from shared.config import GatewayConfig
from shared.lifecycle.garbage import freeze_heap
from shared.randomness import SystemRandomness
from shared.tenancy.tenant_admin import store_api_key
from tests.fuzz.mutations import anything, spoiled, torn
from tests.fuzz.profile import fuzz, timed
from tests.services.gateway.peer import PeerDecode, PeerScheduler
from tests.support.services.model_dir import write_model_dir
from tests.support.waiting import until
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.store import MemoryStore

API_KEY = "key-of-tenant-1"
ANSWER = "hello world, how are you? 😀 東京"
MAX_BODY_BYTES = 256 * 1024
ANSWER_S = 20.0
PATIENT_S, IMPATIENT_S = 10.0, 0.1  # the latter for incomplete requests
STATUSES = (200, 204, 400, 401, 404, 405, 413, 415, 429, 503, 504, 529)

COMMON: dict[str, Any] = {
    "model": "tiny",
    "stream": False,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "max_tokens": 9,
    "min_tokens": 1,
    "n": 2,
    "stop": ["you"],
    "stop_token_ids": [5],
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"7": 1.5},
    "bad_words": ["the"],
    "cache_salt": "salt",
    "priority": 1,
    "response_format": {"type": "text"},
}
CHAT = {
    **COMMON,
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "a"},
    ],
    "logprobs": True,
    "top_logprobs": 2,
}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
TEXT = {**COMMON, "prompt": ["hello", "world"], "echo": True, "logprobs": 1, "best_of": 2}
TOKENS = {"prompt": [[5, 6, 7], [8]], "max_tokens": 4, "echo": True}
EMBEDDING = {"input": ["hello", "you"], "encoding_format": "base64", "pooling": "mean"}
RERANK = {
    "query": "hello",
    "documents": ["you", {"text": "a"}],
    "top_n": 1,
    "return_documents": True,
}
SCORE = {"text_1": ["hello", "a"], "text_2": ["you", "b"], "instruction": None}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": [1]}}
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "x-anthropic-billing-header: a"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, USE]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "r"}],
        },
        {"role": "system", "content": "be brief"},
    ],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["you"],
    "temperature": 0.5,
    "top_k": 5,
    "stream": True,
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 3},
    "output_config": {"effort": "low"},
}
# the chat template knows no tools
TEXTS = {**MESSAGES, "messages": [MESSAGES["messages"][0], MESSAGES["messages"][-1]]}
CALLED = {**MESSAGES, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
RESPONSE = {
    **{name: COMMON[name] for name in ("model", "temperature", "stop", "seed", "bad_words")},
    "input": [
        {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "12:34"},
    ],
    "instructions": "be brief",
    "tools": [
        {"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": False},
        {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "top_logprobs": 2,
    "max_output_tokens": 9,
    "metadata": {"a": "b"},
    "store": True,
    "truncation": "auto",
}
NEXT_RESPONSE = {
    "input": [{"type": "item_reference", "id": "msg_" + "0" * 36}],
    "previous_response_id": "resp_" + "0" * 32,
}
PLAIN_RESPONSE = {
    "input": [
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "content": [{"text": "hm"}]},
    ],
    "stream": True,
    "tools": RESPONSE["tools"],
}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", STREAM),
    ("/v1/completions", TEXT),
    ("/v1/completions", TOKENS),
    ("/v1/embeddings", EMBEDDING),
    ("/v1/rerank", RERANK),
    ("/v1/score", SCORE),
    ("/v1/messages", TEXTS),
    ("/v1/messages", CALLED),
    ("/v1/messages/count_tokens", TEXTS),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", PLAIN_RESPONSE),
    ("/v1/responses", NEXT_RESPONSE),
    ("/v1/responses/input_tokens", PLAIN_RESPONSE),
)
PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/models/tiny"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"),
    *("/v1/responses", "/v1/responses/resp_1", "/v1/responses/x/input_items?limit=%ff"),
    *("/health", "/ready", "/metrics", "/openapi.json", "/docs", "/", "/v1/models/%ff%00", "*"),
    *("/v1/models/../../etc", "//", "/%2e%2e/", "/v1/models/" + "a" * 3000, "http://x/health"),
)
METHODS = ("POST", "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "PRI")
TYPES = (
    *("application/json", "application/json; charset=utf-16", "text/plain", "", ";", "a/b/c"),
    *("application/x-www-form-urlencoded", "multipart/form-data", "application/x-msgpack"),
    *("multipart/form-data; boundary=x", "multipart/form-data; boundary=", "application/msgpack"),
)
GOOD_HEADERS = (f"authorization: Bearer {API_KEY}", "content-type: application/json")
BAD_HEADERS = (
    *("authorization: Basic eDp5", "authorization: Bearer \xff", "authorization:", "host:"),
    *("content-length: 5", "content-length: -1", "content-length: 99999999999999999999"),
    *("transfer-encoding: chunked", "transfer-encoding: gzip", "expect: 100-continue"),
    *("connection: upgrade", "upgrade: websocket", "upgrade: h2c", "cookie: \x80=\xff; ;="),
    *("content-encoding: gzip", "accept: " + "*/*," * 500, "x" * 300 + ": y", "range: bytes=9-1"),
)


class FuzzedGateway:
    """A gateway whose peers reply immediately, shared by all examples of a run."""

    def __init__(self, patience_s: float, max_body_bytes: int) -> None:
        """`patience_s`: the timeout of a request's head and of its body."""
        self.patience_s = patience_s
        self.max_body_bytes = max_body_bytes
        self.broken: list[dict[str, Any]] = []
        self.executor = asyncio.Runner()
        self.executor.get_loop().set_exception_handler(lambda _, each: self.broken.append(each))
        self.executor.run(self._start())
        atexit.register(self._close)

    def _close(self) -> None:
        self.executor.run(self._stop())
        self.executor.close()

    async def _stop(self) -> None:
        for each in (self.gateway, *self.peers):
            await each.stop()

    async def _start(self) -> None:
        directory = write_model_dir(Path(tempfile.mkdtemp()) / "tiny")
        files, store, network = ModelFiles(directory), MemoryStore(), SimulatedNetwork()
        await store_api_key(store, API_KEY, "tenant-1")
        config = GatewayConfig(
            nats_url="nats://here",
            process_id="gateway-1",
            redis_url="redis://here",
            model_dir=directory,
            http_port=0,
            max_body_bytes=self.max_body_bytes,
        )
        self.gateway = GatewayService(
            config,
            network.bus("gateway-1"),
            GatewayStores.of_one(store),
            PreparationPools.of(config, checked_files(files, family_of(files))),
            clock=MonotonicClock(),
            randomness=SystemRandomness(),
        )
        own = self.gateway._web_server
        app = own._server.config.app
        await own.stop()
        self.gateway._web_server = WebServer(
            app,  # type: ignore[arg-type]
            "127.0.0.1",
            0,
            head_timeout_s=self.patience_s,
            body_timeout_s=self.patience_s,
            keep_alive_s=1,  # a request may lose its "connection: close"
        )
        decode = PeerDecode(network.bus("decode-1"), files.tokenizer.encode([ANSWER]))
        scheduler = PeerScheduler(network.bus("scheduler-1"), [decode])
        self.peers = (scheduler, decode)
        for each in (self.gateway, *self.peers):
            await each.start()
        while not self.gateway.readiness().ready:
            await asyncio.sleep(0.01)
        good = await self.send_until_answered(
            request_of("POST", "/v1/completions", GOOD_HEADERS, GOOD_BODY)
        )
        assert good.startswith(b"HTTP/1.1 200") and b"hello world" in good

    async def send(self, data: bytes) -> bytes:
        """Returns everything that the gateway sends until it closes."""
        host, port = self.gateway._web_server.address
        reader, writer = await asyncio.open_connection(host, port)
        answer = b""
        try:
            async with asyncio.timeout(ANSWER_S):
                writer.write(data)
                answer = await reader.read()
        except ConnectionError:
            pass  # unread bytes turn the close into a reset
        finally:
            writer.transport.abort()
        return answer

    async def send_until_answered(self, data: bytes) -> bytes:
        """Retries: on a stalled machine the short timeout can hit good requests, too."""
        async with asyncio.timeout(ANSWER_S):
            while not (answer := await self.send(data)):
                pass
        return answer

    async def play(self, data: bytes) -> bytes:
        with structlog.testing.capture_logs() as logs:
            answer = await self.send(data)
            await until(lambda: not len(self.gateway._driver), poll_s=0.001)
        health = await self.send_until_answered(request_of("GET", "/health", (), b""))
        assert health.startswith(b"HTTP/1.1 200"), health
        errors = [each for each in logs if each["log_level"] in ("error", "critical")]
        assert not errors, errors
        assert not self.broken, self.broken
        return answer


def request_of(method: str, path: str, headers: tuple[str, ...], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", *headers]
    if body and not any(each.startswith(("content-length", "transfer")) for each in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


GOOD_BODY = json.dumps({"prompt": "x", "max_tokens": 9}).encode()


@cache
def gateway_client(patience_s: float, max_body_bytes: int = MAX_BODY_BYTES) -> FuzzedGateway:
    return FuzzedGateway(patience_s, max_body_bytes)


def check(answer: bytes) -> None:
    """Checks that it is a documented response in the documented form."""
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    if not answer:  # the client did not send the rest after status 100
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    assert status in STATUSES, answer
    if status < 300 or b"text/plain" in head:  # non-HTTP input is answered below the API
        return
    if b"\r\ntransfer-encoding: chunked" in head.lower() or not body:
        return
    error = json.loads(body)["error"]
    assert error["message"] and (
        error["type"] if "request_id" in json.loads(body) else error["code"]
    )


def json_bodies(tree: dict[str, Any]) -> st.SearchStrategy[bytes]:
    good = json.dumps(tree).encode()
    endless = [json.dumps({key: 0})[:-2].encode() + b"[" * 9000 for key in (*tree, "tools")]
    return (
        st.sampled_from(endless)
        | spoiled([tree], has_bytes=False).map(lambda each: json.dumps(each).encode())
        | torn([good])
    )


@st.composite
def json_requests(draw: st.DrawFn) -> bytes:
    path, tree = draw(st.sampled_from(BODIES))
    return request_of("POST", path, GOOD_HEADERS, draw(json_bodies(tree)))


@st.composite
def header_requests(draw: st.DrawFn) -> bytes:
    """Requests with right or wrong headers and sizes, and a good body or another."""
    _, tree = draw(st.sampled_from(BODIES))
    body = draw(st.sampled_from((json.dumps(tree).encode(), b"", b"[" * 200_000)) | anything)
    size = draw(st.sampled_from((None, None, MAX_BODY_BYTES, MAX_BODY_BYTES + 1)))
    if size is not None:
        body = b" " * (size - len(body)) + body
    headers = [GOOD_HEADERS[0], f"content-type: {draw(st.sampled_from(TYPES))}"]
    headers += draw(st.lists(st.sampled_from(BAD_HEADERS), max_size=3))
    method, path = draw(st.sampled_from(METHODS)), draw(st.sampled_from(PATHS))
    return request_of(method, path, tuple(headers), body)


@st.composite
def malformed_requests(draw: st.DrawFn) -> bytes:
    path, tree = draw(st.sampled_from(BODIES))
    good = request_of("POST", path, GOOD_HEADERS, json.dumps(tree).encode())
    return draw(torn([good]) | anything)


@fuzz(60)
@given(json_requests())
def test_bodies(data: bytes) -> None:
    patient = gateway_client(PATIENT_S)
    answer = patient.executor.run(patient.play(data))
    assert answer or len(data) > MAX_BODY_BYTES  # whose rejection the reset may overtake
    if answer:
        check(answer)


@fuzz(30)
@given(header_requests())
def test_methods_paths_headers_and_sizes(data: bytes) -> None:
    impatient = gateway_client(IMPATIENT_S)
    answer = impatient.executor.run(impatient.play(data))
    if answer:
        check(answer)


@fuzz(24)
@given(malformed_requests())
def test_malformed_http(data: bytes) -> None:
    impatient = gateway_client(IMPATIENT_S)
    answer = impatient.executor.run(impatient.play(data))
    if answer:
        check(answer)


# ── bodies at their bound ────────────────────────────────────────────────────────────────────────

UNITS = (b"[]", b"{}", b"0", b'""', b"[[]]", b'{"a":[]}', b'{"role":"user","content":"a"}')
FIELDS = (
    b"tools",
    b"messages",
    b"prompt",
    b"input",
    b"documents",
    b"stop",
    b"logit_bias",
    b"unknown",
    b"request",
)
LARGE_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
    *("/rerank", "/v1/prefixes/dry_run", "/v1/prefixes/large"),
)
MAX_TURN_S = 0.05


@st.composite
def large_bodies(draw: st.DrawFn) -> bytes:
    """A wide or a deep value in one field, as large as the gateway decodes on its event loop, or
    larger, so that a preparation process decodes it.
    """
    field, size = draw(st.sampled_from(FIELDS)), draw(st.sampled_from((250_000, 2_000_000)))
    if draw(st.booleans()):
        unit = draw(st.sampled_from(UNITS))
        value = b"[" + b",".join([unit] * (size // (len(unit) + 1))) + b"]"
    else:
        opening = draw(st.sampled_from((b"[", b'{"a":')))
        value = opening * (size // len(opening))
    path = draw(st.sampled_from(LARGE_PATHS))
    method = "PUT" if path.endswith("large") else "POST"
    body = b'{"' + field + b'":' + value + b"}"
    return request_of(method, path, GOOD_HEADERS, body)


async def longest_turn_s(work: Awaitable[bytes]) -> tuple[bytes, float]:
    """The most CPU seconds of this thread that the loop spends in one iteration during `work`,
    with garbage collected as in a process of the gateway: the heap of the tests is much larger.
    """
    thresholds = gc.get_threshold()
    freeze_heap()
    longest, task = 0.0, asyncio.ensure_future(work)
    before = time.thread_time()
    while not task.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, before = max(longest, now - before), now
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    return task.result(), longest


@timed
@fuzz(2)
@given(large_bodies())
def test_no_body_holds_the_event_loop(data: bytes) -> None:
    """CPU time, which a busy machine does not change."""
    large = gateway_client(PATIENT_S, max_body_bytes=4 << 20)
    answer, turn_s = large.executor.run(longest_turn_s(large.send(data)))
    check(answer)
    assert turn_s <= MAX_TURN_S
