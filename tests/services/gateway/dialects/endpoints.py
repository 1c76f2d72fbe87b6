"""The endpoints of all dialects as their clients call them, over HTTP and over NATS.

A new endpoint has one line in BODIES; a new one that writes text has one in REASONS, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.dialect_table import DIALECTS
from services.gateway.dialects.open_dialects import dialect_of
from services.gateway.dialects.paths import ACCOUNT_ROOTS, openai_paths
from services.gateway.request.endpoint import Endpoint, GeneratingEndpoint
from shared.errors import HearthError
from tests.services.gateway.nats_api.conftest import Api, all_of, next_of

ACCOUNT = "tenant-1"
MODEL = "{model:path}"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {  # the smallest that are valid, by the names of endpoints
    "chat": {"messages": HI},
    "completions": {"prompt": "hi"},
    "embeddings": {"input": "hi"},
    "rerank": {"query": "hi", "documents": ["hi"]},
    "score": {"text_1": "hi", "text_2": "hi"},
    "messages": {"model": "tiny", "max_tokens": 400, "messages": HI},
    "count_tokens": {"model": "tiny", "messages": HI},
    "responses": {"input": "hi"},
    "tokenize": {"prompt": "hi"},
    "detokenize": {"tokens": [5]},
    "workers_ai": {"prompt": "hi"},
    "input_tokens": {"input": "hi"},
    "dry_run": {"request": {"messages": HI}},
}
REASONS = {  # of an end at the number of tokens, and at a stop string
    "chat": ("length", "stop"),
    "completions": ("length", "stop"),
    "messages": ("max_tokens", "stop_sequence"),
    "responses": ("max_output_tokens", ""),
    "workers_ai": ("length", "stop"),
}
HAND_MADE = {  # the paths of bodies whose routes no endpoint declares
    "workers_ai": tuple(f"{root}/run/{MODEL}" for root in ACCOUNT_ROOTS),
    "input_tokens": tuple(openai_paths("/responses/input_tokens")),
    "dry_run": ("/v1/prefixes/dry_run",),
}
REASON_KEYS = {"finish_reason", "stop_reason", "reason"}
TEXT_KEYS = {"content", "text", "response"}


@dataclass(frozen=True)
class Reply:
    status: int
    request_id: str
    content: bytes
    headers: Mapping[str, str]

    @property
    def objects(self) -> list[Any]:
        """The body, or the events of a stream."""
        lines = self.content.decode().splitlines()
        data = (each.removeprefix("data: ") for each in lines)
        return [json.loads(each) for each in data if each.startswith("{")]

    @property
    def text(self) -> str:
        """That the model wrote."""
        found = (value for key, value in values(self.objects) if key in TEXT_KEYS)
        return "".join(each for each in found if isinstance(each, str))

    @property
    def reason(self) -> str:
        """The last one that the reply names."""
        found = [value for key, value in values(self.objects) if key in REASON_KEYS and value]
        return found[-1] if found else ""


@dataclass(frozen=True)
class Row:
    """One endpoint over one transport. `endpoint`: None for a route that none declares."""

    name: str
    transport: str
    paths: tuple[str, ...]
    dialect: Dialect
    endpoint: Endpoint | None

    def __str__(self) -> str:
        return f"{self.name}-{self.transport}"

    @property
    def body(self) -> dict[str, Any]:
        return BODIES[self.name]

    @property
    def generates(self) -> bool:
        return isinstance(self.endpoint, GeneratingEndpoint)

    def field(self, *names: str) -> str:
        """The name that the endpoint's bodies have for it; empty if they have none."""
        known = () if self.endpoint is None else self.endpoint.request.__struct_fields__
        return next((each for each in names if each in known), "")

    def with_model(self, model: str) -> tuple[dict[str, Any], str]:
        """The body, and the model in its path."""
        if MODEL in self.paths[0]:
            return self.body, model
        if "request" in self.body:
            return {"request": {**self.body["request"], "model": model}}, ""
        return {**self.body, "model": model}, ""

    def path(self, *, model: str = "tiny", account: str = ACCOUNT, number: int = 0) -> str:
        return self.paths[number].replace("{account:str}", account).replace(MODEL, model)

    async def send(
        self,
        api: Api,
        body: bytes | Mapping[str, Any],
        *,
        http: httpx.AsyncClient | None = None,
        path: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if self.transport == "nats":
            return await self._over_nats(api, data, headers)
        response = await (http or api.cluster.http).post(
            path or self.path(),
            content=data,
            headers={"content-type": "application/json", **(headers or {})},
        )
        request_id = response.headers.get("x-request-id", "")
        return Reply(response.status_code, request_id, response.content, response.headers)

    async def _over_nats(self, api: Api, data: bytes, headers: Mapping[str, str] | None) -> Reply:
        received = await api.send(self.name, data, headers={**headers} if headers else None)
        is_streamed = b'"stream": true' in data
        messages = await all_of(received) if is_streamed else [await next_of(received)]
        found = messages[-1].headers or {}
        status = int(found.get("Nats-Service-Error-Code", "200"))
        content = b"".join(each.data for each in messages)
        return Reply(status, found["Hearth-Request"], content, found)

    def check_rejected(self, reply: Reply, error: HearthError) -> None:
        """In the dialect's form, as this error: only the words of the message may differ."""
        status, body = self.dialect.encode_error(error, reply.request_id)
        assert reply.status == status, reply.content
        assert without_words(json.loads(reply.content)) == without_words(
            json.loads(msgspec.json.encode(body))
        )
        if error.retry_after_s is not None:
            assert int(reply.headers["retry-after"]) >= 1
        if self.transport == "http":
            assert reply.headers["content-type"].startswith("application/json")
            for name in self.dialect.request_id_headers:
                assert reply.headers[name] == reply.request_id
        else:
            assert reply.headers["Hearth-End"] == "error"
            assert reply.headers["Nats-Service-Error"]


def without_words(body: Any) -> Any:
    """With true for each message that is not empty."""
    if isinstance(body, dict):
        return {
            key: bool(value) if key == "message" else without_words(value)
            for key, value in body.items()
        }
    return [without_words(each) for each in body] if isinstance(body, list) else body


def values(body: Any) -> Iterator[tuple[str, Any]]:
    """All keys with their values, at every depth, in their order."""
    if isinstance(body, dict):
        for key, value in body.items():
            yield key, value
            yield from values(value)
    elif isinstance(body, list):
        for each in body:
            yield from values(each)


def _rows() -> Iterator[Row]:
    declared = [
        (dialect, each) for dialect in DIALECTS for each in dialect.endpoints if not each.is_free
    ]
    for dialect, endpoint in declared:
        paths = tuple(endpoint.paths) or HAND_MADE[endpoint.name]
        yield Row(endpoint.name, "http", paths, dialect, endpoint)
        if endpoint.is_on_nats:
            yield Row(endpoint.name, "nats", paths, dialect, endpoint)
    for name in HAND_MADE.keys() - {endpoint.name for _, endpoint in declared}:
        paths = HAND_MADE[name]
        yield Row(name, "http", paths, dialect_of(paths[0], DIALECTS), None)


ROWS = sorted(_rows(), key=str)
GENERATING = [each for each in ROWS if each.generates]
WRITING = [each for each in GENERATING if each.field("max_tokens", "max_output_tokens")]
# a row, and whether its response is streamed
CALLS = [*((each, False) for each in GENERATING), *((each, True) for each in WRITING)]
