from __future__ import annotations

import asyncio
import os

import pytest

from shared.errors import LinkLost
from shared.kv_wire.frames import Ack
from shared.kv_wire.link import LinkEnd
from shared.kv_wire.ports.push_plan import plan_push
from shared.kv_wire.push_link import StagedLink
from shared.kv_wire.shared_memory import SharedMemoryStaging, create_memory
from tests.shared.kv_wire.support import DEADLINE_S, fill_with, header


async def test_waiting_send_fails_if_link_ends_as_slot_is_freed() -> None:
    fd = create_memory(4096)
    plan = plan_push(LinkEnd(), LinkEnd(), is_local=True)
    link = StagedLink(SharedMemoryStaging(fd, 1, 4096), on_end=lambda ended: None, plan=plan)
    os.close(fd)
    first, second = (
        asyncio.create_task(link.send(header(8, sequence_number=number), fill_with(b"x" * 8)))
        for number in range(2)
    )
    async with asyncio.timeout(DEADLINE_S):
        while not link.num_unacked:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)  # the second send waits for the slot of the first
        link.record_arrived(Ack(0))
        link.ended(LinkLost("gone"))
        await first
        with pytest.raises(LinkLost, match="gone"):
            await second
