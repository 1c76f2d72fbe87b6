"""A link over the wheel's agents, and which transport its frames take: `scripts/test --long nixl`.

What the port does with agents that fail is in tests/shared/kv_wire/ports, without the wheel.
"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

import msgspec
import pytest

from shared.errors import FrameRefused, LinkLost
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.ports.nixl_port import NixlPort
from tests.shared.kv_wire.support import INSTANCE, RecordingSink, fill_with, header, payload_of
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="the wheel is not installed")


async def test_frames_arrive_through_agents_of_the_wheel() -> None:
    server = await KvServer.start(instance_id=INSTANCE, nixl=await NixlPort.start())
    dialer = Dialer(connect_timeout_s=LIMIT_S, nixl=await NixlPort.start())
    sink = RecordingSink()
    server.expect(b"placement-a", sink)
    link = await dialer.link(msgspec.structs.replace(server.address, unix_path=""))
    assert (link.plan.port, link.plan.refused) == ("nixl", "")
    sent = [payload_of(num_bytes) for num_bytes in (1, 4097, 2 << 20, 8 << 20, 3)]
    await asyncio.gather(
        *(
            link.send(header(len(data), sequence_number=number), fill_with(data))
            for number, data in enumerate(sent)
        )
    )
    assert [data for _, data in sink.frames] == sent
    with pytest.raises(FrameRefused, match="not expected"):
        await link.send(header(3, placement_id=b"nobody"), fill_with(b"abc"))
    await server.close()  # the receiver dies first
    with pytest.raises(LinkLost):
        await link.send(header(3), fill_with(b"abc"))
    await dialer.close()
