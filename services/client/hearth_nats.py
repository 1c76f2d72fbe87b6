"""A client of Hearth's API over NATS. It needs only nats-py: copy this file into your application.

    client = await HearthClient.connect("nats://CLIENT:PASSWORD@host:4222")
    completion = await client.request("chat", {"messages": [{"role": "user", "content": "Hi"}]})
    async for event in client.stream("chat", {"messages": […], "seed": 7}):
        print(event["choices"])

`hearth credential client --tenant TENANT` prints the URL. Endpoints and bodies are those of HTTP:
chat, completions, embeddings, tokenize, detokenize, models. `ResponseLost` means that the gateway
or messages were lost: repeat the request. With the same `seed` the text is the same, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

MAX_SILENCE_S = 8.0  # a gateway sends something every 2 s, if only a check of this client
MAX_BODY_BYTES = 4 << 20  # the server closes the connection of a client that sends far more


class ApiError(Exception):
    """The gateway's error: its HTTP `status`, and the `code` and `param` of its body."""

    def __init__(self, status: int, message: str, body: Any = None) -> None:
        super().__init__(f"{status}: {message}")
        details = body["error"] if isinstance(body, dict) and "error" in body else {}
        self.status, self.message, self.body = status, message, body
        self.code, self.param = details.get("code"), details.get("param")


class ResponseLost(Exception):
    """An incomplete response: its gateway or messages were lost. A retry may succeed."""


class HearthClient:
    def __init__(self, connection: Client, client_id: str) -> None:
        """Uses a connection whose inbox prefix is `_INBOX.{client_id}`."""
        self._connection = connection
        self._client_id = client_id

    @classmethod
    async def connect(cls, url: str, **options: Any) -> HearthClient:
        """Connects to `url`. `options` are those of `nats.connect`, such as `tls`."""
        user = urlsplit(url).username or ""
        options = {"max_reconnect_attempts": -1, **options}
        return cls(await nats.connect(url, inbox_prefix=f"_INBOX.{user}".encode(), **options), user)

    async def close(self) -> None:
        await self._connection.close()

    async def request(self, endpoint: str, body: Any, *, gateway: str = "", **options: Any) -> Any:
        """Returns the body of the response. Raises ApiError, ResponseLost. Options: `_headers`."""
        headers = {**_headers(**options), "Hearth-Checks": "true"}
        async with aclosing(self._replies(endpoint, body, headers, gateway)) as replies:
            while (reply := await anext(replies)).reply:
                pass  # a check
            return json.loads(reply.data)

    async def stream(
        self, endpoint: str, body: Any, **options: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the events of the response. Raises ApiError and ResponseLost. A caller that stops
        early should close the iterator (`contextlib.aclosing`): that cancels the request at once.
        """
        request_id = gateway = ""
        headers, is_complete, expected = _headers(**options), False, 0
        replies = self._replies(endpoint, {**body, "stream": True}, headers)
        try:
            async for reply in replies:
                fields = reply.headers or {}
                request_id = fields.get("Hearth-Request", request_id)
                gateway = fields.get("Hearth-Gateway", gateway)
                if fields.get("Hearth-Seq") != str(expected):
                    raise ResponseLost(f"message {expected} of {request_id} was lost")
                expected += 1
                is_complete = "Hearth-End" in fields
                if is_complete:
                    return
                for line in reply.data.splitlines():
                    yield json.loads(line)
        except ApiError:
            is_complete = True
            raise
        finally:
            await replies.aclose()
            if request_id and not is_complete and self._connection.is_connected:
                await self._publish("cancel", {"request": request_id}, "", None, gateway)

    async def cancel(self, request_id: str, gateway: str) -> bool:
        """Ends a request, by `Hearth-Request` and `Hearth-Gateway` of its first message."""
        reply = await self.request("cancel", {"request": request_id}, gateway=gateway)
        return bool(reply["cancelled"])

    async def _replies(
        self, endpoint: str, body: Any, headers: dict[str, str], gateway: str = ""
    ) -> AsyncGenerator[Msg, None]:
        received: asyncio.Queue[Msg] = asyncio.Queue()

        async def take(message: Msg) -> None:
            received.put_nowait(message)
            if message.reply:  # a check whether this client is still there
                await self._connection.publish(message.reply)

        inbox = self._connection.new_inbox()
        subscription = await self._connection.subscribe(inbox, cb=take)
        try:
            await self._publish(endpoint, body, inbox, headers, gateway)
            while True:
                try:
                    async with asyncio.timeout(MAX_SILENCE_S):
                        reply = await received.get()
                except TimeoutError:
                    raise ResponseLost("no message of the gateway arrives") from None
                _raise_error(reply)
                yield reply
        finally:
            if not self._connection.is_closed:
                await subscription.unsubscribe()

    async def _publish(
        self, endpoint: str, body: Any, inbox: str, headers: dict[str, str] | None, gateway: str
    ) -> None:
        data = json.dumps(body).encode()
        if len(data) > min(self._connection.max_payload, MAX_BODY_BYTES):
            raise ApiError(413, f"the request has {len(data)} bytes: use HTTP, not NATS")
        name = f"hearth.v1.api.{endpoint}.{self._client_id}" + (gateway and f".{gateway}")
        await self._connection.publish(name, data, reply=inbox, headers=headers or None)


def _headers(deadline_s: float | None = None, affinity: str = "") -> dict[str, str]:
    headers = {} if deadline_s is None else {"Hearth-Deadline-S": str(deadline_s)}
    return {**headers, "Hearth-Affinity": affinity} if affinity else headers


def _raise_error(reply: Msg) -> None:
    fields = reply.headers or {}
    if fields.get("Status") == "503":
        raise ApiError(503, "no gateway is connected")
    if "Nats-Service-Error-Code" in fields:
        status, message = int(fields["Nats-Service-Error-Code"]), fields["Nats-Service-Error"]
        raise ApiError(status, message, json.loads(reply.data) if reply.data else None)
