"""nats-py clients for tests."""

from __future__ import annotations

from typing import Any

from nats.aio.client import Client


class OrderedClient(Client):
    """A client whose `flush` returns when the server has processed all that was sent before."""

    async def flush(self, timeout: int = 10) -> None:  # noqa: ASYNC109 nats-py's signature
        """nats-py writes the PING of a flush before its buffered data, but sends that buffer before
        the PONG returns: the second PING follows the buffer.
        """
        for _ in range(2):
            await super().flush(timeout)


async def connect_ordered(url: str, **options: Any) -> OrderedClient:
    client = OrderedClient()
    await client.connect(url, **options)
    return client
