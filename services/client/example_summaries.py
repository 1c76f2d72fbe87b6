"""An example service: one line of text comes in over TCP, its summary goes out as it is generated.

    HEARTH_NATS_URL=$(hearth credential client --tenant default) \\
        python -m services.client.example_summaries 9000
    echo "A long text …" | nc 127.0.0.1 9000

Nobody notices a lost gateway: the request is repeated with its seed, which gives the same text, and
what has been sent already is skipped.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from nats.errors import Error as NatsError

from services.client.hearth_nats import ApiError, HearthClient, ResponseLost

NUM_TRIES = 4
MAX_TOKENS = 200
MAX_LINE_BYTES = 1024 * 1024
RETRYABLE = (429, 503)
RETRY_S = 1.0


def body_of(text: str) -> dict[str, Any]:
    task = f"Summarize in one sentence:\n\n{text}"
    messages = [{"role": "user", "content": task}]
    return {"messages": messages, "max_tokens": MAX_TOKENS, "seed": secrets.randbits(32)}


async def summary(client: HearthClient, body: dict[str, Any]) -> AsyncGenerator[str, None]:
    """Yields the text in parts. Raises ApiError, or ResponseLost after NUM_TRIES."""
    num_sent = 0
    for left in reversed(range(NUM_TRIES)):
        num_received = 0
        try:
            async with aclosing(client.stream("chat", body)) as events:
                async for event in events:
                    for choice in event["choices"]:
                        text = choice["delta"].get("content") or ""
                        fresh = text[max(0, num_sent - num_received) :]
                        num_received += len(text)
                        num_sent += len(fresh)
                        yield fresh
            return
        except (ApiError, ResponseLost) as error:
            is_final = isinstance(error, ApiError) and error.status not in RETRYABLE
            if is_final or not left:
                raise
        await asyncio.sleep(RETRY_S)


async def serve(client: HearthClient, port: int) -> asyncio.Server:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                async with aclosing(summary(client, body_of(line.decode()))) as parts:
                    async for part in parts:
                        writer.write(part.encode())
                        await writer.drain()
                writer.write(b"\n")
        except (ApiError, ResponseLost, ValueError, NatsError) as error:
            writer.write(f"error: {error}\n".encode())
        except ConnectionError:
            pass  # the reader has left: closing the stream has cancelled its request
        finally:
            writer.close()

    return await asyncio.start_server(respond, "127.0.0.1", port, limit=MAX_LINE_BYTES)


async def main() -> None:
    client = await HearthClient.connect(os.environ["HEARTH_NATS_URL"])
    server = await serve(client, int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
