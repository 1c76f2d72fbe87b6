"""A receiver that a test kills: prints its address as JSON and never completes a delivery."""

from __future__ import annotations

import asyncio

import msgspec

from shared.kv_wire.kv_server import KvServer
from tests.shared.kv_wire.support import INSTANCE, RecordingSink


async def main() -> None:
    server = await KvServer.start(instance_id=INSTANCE)
    server.expect(b"placement-a", RecordingSink(gate=asyncio.Event()))
    print(msgspec.json.encode(server.address).decode(), flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
