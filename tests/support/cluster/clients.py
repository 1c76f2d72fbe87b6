"""HTTP clients that record the time of each event and the final response.

Over plain asyncio streams: the clients share two cores with the cluster.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from services.client.http_client import BodyReader, http_request

READ_BYTES = 65536
DONE = b"data: [DONE]"
TEXT, NO_TEXT = b'"content":"', b'"content":""'


@dataclass
class ChoiceOutput:
    """Everything received for one choice. Two runs of a request must agree in it.

    `calls` has names and arguments by index; their ids differ between requests.
    """

    text: str = ""
    calls: dict[int, tuple[str, str]] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


@dataclass
class Exchange:
    """One streamed request. Times are readings of this machine's monotonic clock."""

    body: dict[str, Any]
    gateway: str
    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # time of each event
    ended: float = 0.0
    status: int = 0
    headers: bytes = b""
    events: list[bytes] = field(default_factory=list)
    is_done: bool = False
    failure: str = ""  # how the connection failed, if it did
    first_event: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_successful(self) -> bool:
        return self.status == 200 and self.is_done and not self.errors

    @property
    def is_broken(self) -> bool:
        """The connection ended before the response did: the only sign of a dead gateway."""
        return not self.is_done and self.status in (0, 200) and not self.errors

    @property
    def has_retry_after(self) -> bool:
        return b"retry-after:" in self.headers.lower()

    @property
    def errors(self) -> list[bytes]:
        return [event for event in self.events if b'"error"' in event]

    @property
    def output(self) -> dict[int, ChoiceOutput]:
        found: dict[int, ChoiceOutput] = {}
        for event in self._messages():
            for choice in event.get("choices") or ():
                _add(found.setdefault(choice["index"], ChoiceOutput()), choice)
        return found

    @property
    def has_output(self) -> bool:
        """Whether any choice has begun: an event that fills a silence is an empty one."""
        return any(each != ChoiceOutput() for each in self.output.values())

    @property
    def usage(self) -> tuple[int, int]:
        """Prompt and completion tokens; cached tokens depend on the serving worker."""
        for event in reversed(self._messages()):
            if event.get("usage"):
                return event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]
        return 0, 0

    @property
    def metadata(self) -> dict[str, Any]:
        return next((e["hearth"] for e in reversed(self._messages()) if e.get("hearth")), {})

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def text_arrivals(self) -> list[float]:
        """The arrival time of each event of a chat that has text."""
        events = zip(self.events, self.arrivals, strict=True)
        return [at for event, at in events if TEXT in event and NO_TEXT not in event]

    def pause_since(self, moment: float) -> float:
        """Returns the longest pause in seconds that ended after `moment`; no fault happened
        before.
        """
        times = [self.started, *self.arrivals]
        pairs = itertools.pairwise(times)
        return max((b - max(a, moment) for a, b in pairs if b > moment), default=0.0)

    def __str__(self) -> str:
        tail = b" ".join(self.events[-1:])[:300]
        return f"{self.gateway} {self.status} {self.failure or 'ended'} {tail!r}"

    def _messages(self) -> list[dict[str, Any]]:
        return [
            msgspec.json.decode(event.partition(b"data:")[2])
            for event in self.events
            if event.startswith(b"data: {")
        ]


def _add(output: ChoiceOutput, choice: dict[str, Any]) -> None:
    delta = choice.get("delta") or {}
    output.text += choice.get("text") or delta.get("content") or ""
    for call in delta.get("tool_calls") or ():
        name, arguments = output.calls.get(call["index"], ("", ""))
        function = call["function"]
        output.calls[call["index"]] = (
            name + function.get("name", ""),
            arguments + function.get("arguments", ""),
        )
    if choice.get("finish_reason"):
        output.finish_reasons.append(choice["finish_reason"])
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        output.logprobs += logprobs["content"] or ()
    elif "tokens" in logprobs:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        output.logprobs += zip(*(logprobs[name] for name in names), strict=True)


async def send(url: str, api_key: str, path: str, body: dict[str, Any]) -> Exchange:
    return await run_exchange(Exchange(body, url), url, api_key, path)


async def run_exchange(exchange: Exchange, url: str, api_key: str, path: str) -> Exchange:
    """Runs the exchange to its end and records errors in it."""
    parts = urlsplit(url)
    exchange.started = time.monotonic()
    writer = None
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(http_request(url, api_key, path, exchange.body))
        await _read(exchange, reader)
    except OSError as error:
        exchange.failure = repr(error)
    finally:
        exchange.ended = time.monotonic()
        exchange.first_event.set()
        if writer is not None:
            writer.close()
    return exchange


async def _read(exchange: Exchange, reader: asyncio.StreamReader) -> None:
    body, head, rest = BodyReader(), b"", b""
    while not body.is_complete:
        data = await reader.read(READ_BYTES)
        if not data:
            exchange.failure = "the connection ended"
            return
        if not exchange.headers:
            head += data
            exchange.headers = head.partition(b"\r\n\r\n")[0] if b"\r\n\r\n" in head else b""
        *events, rest = (rest + body.feed(data)).split(b"\n\n")
        exchange.status = body.status
        _take(exchange, events)
    if rest:
        _take(exchange, [rest])


def _take(exchange: Exchange, events: list[bytes]) -> None:
    now = time.monotonic()
    for event in events:
        if event == DONE:
            exchange.is_done = True
        else:
            exchange.events.append(event)
            exchange.arrivals.append(now)
            exchange.first_event.set()
