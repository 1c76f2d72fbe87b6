"""One streamed chat completion, timed: what `hearth up` and `hearth chat` ask with."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec

from shared.clock import Clock
from shared.errors import DependencyUnavailable, HearthError

_TIMEOUT = httpx.Timeout(600.0, connect=5.0)


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    ttft_s: float
    itl_s: tuple[float, ...]  # gaps between the chunks that carried text
    usage: dict[str, Any]
    hearth: dict[str, Any]

    @property
    def median_itl_s(self) -> float:
        return statistics.median(self.itl_s) if self.itl_s else 0.0

    @property
    def num_cached_tokens(self) -> int:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def door(url: str, api_key: str) -> httpx.AsyncClient:
    """A client of the gateway at `url`, with or without its `/v1`."""
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {api_key}"},
        timeout=_TIMEOUT,
        trust_env=False,
    )


async def first_model(client: httpx.AsyncClient) -> str:
    """The id of the first served model."""
    try:
        response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise DependencyUnavailable(f"cannot reach {client.base_url}: {error}") from None
    body = _checked(response, response.content)
    models = body.get("data") or []
    if not models:
        raise DependencyUnavailable(f"no model is served at {client.base_url}")
    return str(models[0]["id"])


async def ask(
    client: httpx.AsyncClient,
    model: str,
    messages: list[dict[str, str]],
    clock: Clock,
    on_text: Callable[[str], None],
) -> Reply:
    """Raises HearthError with the gateway's own words if it refuses or breaks off."""
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = clock.now()
    arrivals: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    hearth: dict[str, Any] = {}
    async for event in _events(client, body):
        for choice in event.get("choices") or ():
            text = (choice.get("delta") or {}).get("content")
            if text:
                arrivals.append(clock.now())
                texts.append(text)
                on_text(text)
        usage = event.get("usage") or usage
        hearth = event.get("hearth") or hearth
    return Reply(
        text="".join(texts),
        ttft_s=(arrivals[0] if arrivals else clock.now()) - started,
        itl_s=tuple(after - before for before, after in itertools.pairwise(arrivals)),
        usage=usage,
        hearth=hearth,
    )


async def _events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The stream's JSON events until `[DONE]`."""
    is_done = False
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                _checked(response, await response.aread())
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    is_done = True
                    continue
                event = msgspec.json.decode(data)
                if "error" in event:
                    raise HearthError(_message_of(event))
                yield event
    except httpx.HTTPError as error:
        raise DependencyUnavailable(f"the connection broke: {error!r}") from None
    if not is_done:
        raise DependencyUnavailable("the stream ended before its end")


def _checked(response: httpx.Response, content: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = {}
    if response.status_code != 200:
        raise HearthError(f"{response.status_code}: {_message_of(body)}")
    if not isinstance(body, dict):
        raise HearthError(f"{response.url} does not answer like a Hearth gateway")
    return body


def _message_of(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "the server gave no reason")
