"""A closed loop of clients that only count events, so that the server's cost is what is measured.

Over HTTP, or over NATS if the target says so. The first response shows how many events carry text;
every other one must have as many events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serving.counting_connection import CountingConnection, EventCount, text_events
from benchmarks.serving.nats_client import NatsConnection
from services.client.http_client import http_request

RESPONSES = "/v1/responses"
NUM_REPEATED = 4  # events at the end of a stream of this API that repeat all its text


@dataclass(frozen=True)
class ClientKind:
    """Options of `CountingConnection`."""

    has_quickack: bool = False
    parses: bool = False


@dataclass(frozen=True)
class Target:
    """The address of a cluster and the endpoint to load.

    `path` is that of chat completions, of an endpoint with the same body, or of responses.
    `nats_url` is that of the same tenant's client. If `is_nats`, chat completions are requested
    there.
    """

    url: str
    api_key: str
    model: str
    path: str = "/v1/chat/completions"
    nats_url: str = ""
    is_stored: bool = False  # whether responses are stored
    is_nats: bool = False

    async def connect(self, number: int, kind: ClientKind) -> CountingConnection:
        if self.is_nats:
            return await NatsConnection.to(self.nats_url, number)
        return await CountingConnection.open(
            self.url, has_quickack=kind.has_quickack, parses=kind.parses
        )

    def request(
        self, prompt: str, num_output_tokens: int, connection: CountingConnection | None = None
    ) -> bytes:
        body = body_of(self.model, prompt, num_output_tokens)
        if isinstance(connection, NatsConnection):
            return connection.message(body)
        if self.path == RESPONSES:
            body |= {"input": body.pop("messages"), "max_output_tokens": body.pop("max_tokens")}
            body["store"] = self.is_stored
        return http_request(self.url, self.api_key, self.path, body)


def body_of(model: str, prompt: str, num_output_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "max_tokens": num_output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


@dataclass
class Tally:
    """The responses that the clients of one load received. Times are in seconds."""

    num_events: int  # expected events of a response
    ttft_s: list[float] = field(default_factory=list)
    num_requests: int = 0
    faults: list[str] = field(default_factory=list)

    def record(self, count: EventCount) -> None:
        if count.num_events == self.num_events:
            self.num_requests += 1
            self.ttft_s.append(count.first_text_at - count.started)
        else:
            beginning = count.beginning[:300]
            self.faults.append(f"{count.num_events} of {self.num_events} events: {beginning!r}")


async def num_events_of(target: Target, prompt: str, num_output_tokens: int) -> int:
    """Events of a response, of which one for each token carries text. Raises ValueError if not."""
    if target.is_nats:
        connection = await target.connect(0, ClientKind())
        count = await connection.request(target.request(prompt, num_output_tokens, connection))
        connection.close()
        if count.num_events < num_output_tokens:
            raise ValueError(f"{count.num_events} events for {num_output_tokens} tokens")
        return count.num_events
    parts = urlsplit(target.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(target.request(prompt, num_output_tokens))
    response = b""
    while not response.endswith(b"0\r\n\r\n"):
        data = await reader.read(65536)
        is_rejected = not response and not data.startswith(b"HTTP/1.1 200")
        if not data or is_rejected:
            raise ValueError(f"no response from {target.url}: {response + data!r}")
        response += data
    writer.close()
    num_events, num_texts = text_events(response)
    if target.path == RESPONSES:
        num_texts -= NUM_REPEATED
    if num_texts != num_output_tokens:
        raise ValueError(f"{num_texts} events with text for {num_output_tokens} tokens")
    return num_events


async def load(
    target: Target,
    prompts: Iterator[str],
    *,
    concurrency: int,
    duration_s: float,
    num_output_tokens: int,
    num_events: int,
    kind: ClientKind = ClientKind(),
) -> Tally:
    """Runs clients. Each client sends its next request when the response to the last one has
    ended.
    """
    tally = Tally(num_events)
    until = time.perf_counter() + duration_s

    async def client(number: int) -> None:
        connection = await target.connect(number, kind)
        try:
            while time.perf_counter() < until:
                message = target.request(next(prompts), num_output_tokens, connection)
                tally.record(await connection.request(message))
        except OSError as error:
            tally.faults.append(str(error))
        finally:
            connection.close()

    await asyncio.gather(*map(client, range(concurrency)))
    return tally
