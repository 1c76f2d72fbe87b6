"""Sends and times one streamed completion, for `hearth up` and `hearth chat`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import httpx
import msgspec

from shared.clock import Clock
from shared.errors import ConfigError, DependencyUnavailable, HearthError
from shared.tls import pinned_context
from shared.transport.wire_errors import UNREADABLE

T = TypeVar("T")
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)


class RequestedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool. `arguments` are as the model wrote them, which should be JSON."""

    id: str
    name: str
    arguments: str

    @property
    def record(self) -> dict[str, Any]:
        """The call in the form that the chat API accepts in the history."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    calls: tuple[RequestedCall, ...] = ()
    ttft_s: float
    itl_s: tuple[float, ...]  # gaps between the chunks that carried text
    usage: dict[str, Any]
    hearth: dict[str, Any]

    @property
    def median_itl_s(self) -> float:
        return statistics.median(self.itl_s) if self.itl_s else 0.0

    @property
    def num_prompt_tokens(self) -> int:
        prompt = self.usage.get("prompt_tokens")
        return prompt if isinstance(prompt, int) else 0

    @property
    def num_cached_tokens(self) -> int:
        details = self.usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return cached if isinstance(cached, int) else 0


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Text(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _StreamedChoice(msgspec.Struct):
    delta: _Text | None = None  # of a chat
    text: str | None = None  # of a completion


class _Event(msgspec.Struct):
    choices: list[_StreamedChoice] | None = None
    usage: dict[str, Any] | None = None
    hearth: dict[str, Any] | None = None
    error: Any = None


class ListedModel(msgspec.Struct, frozen=True):
    id: str
    max_context: int = 0  # tokens; 0: the server does not say


class _ListedModels(msgspec.Struct):
    data: list[ListedModel] | None = None


def gateway_client(url: str, api_key: str, certificate: str = "") -> httpx.AsyncClient:
    """Returns a client of the gateway at `url`, which may end in `/v1`. It accepts that
    `certificate` alone, a PEM file, if one is given. Raises ConfigError.
    """
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {api_key}"},
        timeout=_TIMEOUT,
        trust_env=False,
        verify=pinned_context(certificate) if certificate else True,
    )


async def first_model(client: httpx.AsyncClient, name: str = "") -> ListedModel:
    """Returns the model `name`, else the first of those that the client may use. Raises
    DependencyUnavailable.
    """
    models = await _served_models(client)
    return next((each for each in models if each.id == name), models[0])


async def named_model(client: httpx.AsyncClient, name: str) -> ListedModel:
    """Returns the model `name`. Raises ConfigError if it is not served, DependencyUnavailable."""
    models = await _served_models(client)
    for each in models:
        if each.id == name:
            return each
    names = ", ".join(each.id for each in models)
    raise ConfigError(f"no model {name} is served at {client.base_url}, only {names}")


async def _served_models(client: httpx.AsyncClient) -> list[ListedModel]:
    try:
        response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise DependencyUnavailable(f"cannot reach {client.base_url}: {error}") from None
    _check(response, response.content)
    models = _decoded(response.content, _ListedModels).data
    if not models:
        raise DependencyUnavailable(f"no model is served at {client.base_url}")
    return models


async def stream_chat(
    client: httpx.AsyncClient,
    model: str,
    messages: list[dict[str, Any]],
    clock: Clock,
    on_text: Callable[[str], None],
    **options: Any,
) -> ChatReply:
    """Streams an answer. `options` are fields of the request. Raises HearthError if the gateway
    rejects the request or the stream fails.
    """
    body = {"model": model, "messages": messages, **options}
    return await _stream(client, "/v1/chat/completions", body, clock, on_text)


async def stream_completion(
    client: httpx.AsyncClient,
    model: str,
    prompt: str,
    clock: Clock,
    on_text: Callable[[str], None],
    **options: Any,
) -> ChatReply:
    """Streams what follows a prompt, as a model without a chat template can. Raises HearthError as
    `stream_chat` does.
    """
    body = {"model": model, "prompt": prompt, **options}
    return await _stream(client, "/v1/completions", body, clock, on_text)


async def _stream(
    client: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    clock: Clock,
    on_text: Callable[[str], None],
) -> ChatReply:
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    started = clock.now()
    arrivals: list[float] = []
    texts: list[str] = []
    calls: dict[int, RequestedCall] = {}
    usage: dict[str, Any] = {}
    hearth: dict[str, Any] = {}
    async for event in _events(client, path, body):
        for choice in event.choices or ():
            delta = choice.delta or _Text(content=choice.text)
            for call in delta.tool_calls or ():
                calls[call.index] = _continued(calls.get(call.index), call)
            if text := delta.content:
                arrivals.append(clock.now())
                texts.append(text)
                on_text(text)
        usage = event.usage or usage
        hearth = event.hearth or hearth
    return ChatReply(
        text="".join(texts),
        calls=tuple(call for _, call in sorted(calls.items())),
        ttft_s=(arrivals[0] if arrivals else clock.now()) - started,
        itl_s=tuple(after - before for before, after in itertools.pairwise(arrivals)),
        usage=usage,
        hearth=hearth,
    )


def _continued(call: RequestedCall | None, delta: _Call) -> RequestedCall:
    function = delta.function or _Function()
    before = RequestedCall(id="", name="", arguments="") if call is None else call
    return RequestedCall(
        id=delta.id or before.id,
        name=function.name or before.name,
        arguments=before.arguments + (function.arguments or ""),
    )


async def _events(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncIterator[_Event]:
    """Yields the stream's JSON events until `[DONE]`."""
    is_done = False
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                _check(response, await response.aread())
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    is_done = True
                    continue
                event = _decoded(data, _Event)
                if event.error is not None:
                    raise HearthError(_message_of({"error": event.error}))
                yield event
    except httpx.HTTPError as error:
        raise DependencyUnavailable(f"the connection broke: {error!r}") from None
    if not is_done:
        raise DependencyUnavailable("the stream ended before its end")


def _check(response: httpx.Response, content: bytes) -> None:
    """Checks a response. Raises HearthError with the server's error message, if the
    response has one.
    """
    if response.status_code == 200:
        return
    try:
        body = msgspec.json.decode(content)
    except UNREADABLE:
        body = {}
    raise HearthError(f"{response.status_code}: {_message_of(body)}")


def _decoded(data: bytes | str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise HearthError(f"the server does not answer like a Hearth gateway: {error}") from None


def _message_of(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "the server gave no reason")
