"""An example: one question over NATS, whose answer is printed as it is generated.

    python -m services.client.example_chat nats://CLIENT:PASSWORD@HOST:4222 "What is Hearth?" [NAME]

`hearth credential client --tenant TENANT` prints the URL. NAME: a model (default: the gateway's).
"""

from __future__ import annotations

import asyncio
import sys

from services.client.hearth_nats import ApiError, HearthClient, ResponseLost


async def main(url: str, question: str, model: str = "") -> None:
    client = await HearthClient.connect(url)
    named = {"model": model} if model else {}
    body = {**named, "messages": [{"role": "user", "content": question}]}
    try:
        async for event in client.stream("chat", body):
            for choice in event["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
        print()
    except (ApiError, ResponseLost) as error:
        sys.exit(f"\nerror: {error}")
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
