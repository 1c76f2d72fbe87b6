"""A sender that a test kills: pushes frames to the address in argv[1] (JSON) until then."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from shared.kv_wire.dialer import Dialer
from shared.messages import DataPlaneAddress
from tests.shared.kv_wire.support import fill_with, header
from tests.support.waiting import LIMIT_S

NUM_BYTES = 1 << 20


async def main(address: DataPlaneAddress) -> None:
    link = await Dialer(connect_timeout_s=LIMIT_S).link(address)
    fill = fill_with(bytes(NUM_BYTES))

    async def push() -> None:
        while True:
            await link.send(header(NUM_BYTES), fill)

    await asyncio.gather(*(push() for _ in range(4)))


asyncio.run(main(msgspec.json.decode(sys.argv[1], type=DataPlaneAddress)))
