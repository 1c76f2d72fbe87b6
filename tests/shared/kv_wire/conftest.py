from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec
import pytest
import uvloop

from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import KvDialer, KvReceiver
from shared.kv_wire.push_link import StagedLink
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import DataPlaneAddress, LinkKey
from shared.randomness import SystemRandomness
from tests.shared.kv_wire.support import INSTANCE
from tests.support.waiting import LIMIT_S
from tests.support.world.kv_link import SimulatedDialer, SimulatedReceiver


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Services run on uvloop. The standard loop handles buffers and closing differently."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def server() -> AsyncIterator[KvServer]:
    server = await KvServer.start(instance_id=INSTANCE)
    yield server
    await server.close()


@pytest.fixture
async def dialer() -> AsyncIterator[Dialer]:
    dialer = Dialer(connect_timeout_s=LIMIT_S)
    yield dialer
    await dialer.close()


@pytest.fixture(params=["memfd", "tcp"])
def address(request: pytest.FixtureRequest, server: KvServer) -> DataPlaneAddress:
    """The server's address with one usable transport."""
    if request.param == "tcp":
        return msgspec.structs.replace(server.address, unix_path="")
    return msgspec.structs.replace(server.address, port=1)  # no process listens on port 1


@dataclass(frozen=True)
class Pair:
    receiver: KvReceiver
    dialer: KvDialer
    address: DataPlaneAddress


class KeyedDialer(Dialer):
    """Seals its links over TCP with one key."""

    def __init__(self, link_key: LinkKey | None) -> None:
        super().__init__(connect_timeout_s=LIMIT_S)
        self._link_key = link_key

    async def link(self, target: DataPlaneAddress, link_key: LinkKey | None = None) -> StagedLink:
        return await super().link(target, self._link_key)


@pytest.fixture(params=["memfd", "tcp", "tcp aead", "tcp mac", "simulated"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Both ends of a link, for each implementation."""
    if request.param == "simulated":
        network = SimulatedDialer()
        receiver = SimulatedReceiver(network, INSTANCE)
        yield Pair(receiver, network, receiver.address)
        return
    _, _, security = request.param.partition(" ")
    link_keys = LinkKeys(security, SystemRandomness()) if security else None
    server = await KvServer.start(instance_id=INSTANCE, link_keys=link_keys)
    dialer = KeyedDialer(None if link_keys is None else link_keys.key_for("prefill-1"))
    single_transport = {"port": 1} if request.param == "memfd" else {"unix_path": ""}
    yield Pair(server, dialer, msgspec.structs.replace(server.address, **single_transport))
    await dialer.close()
    await server.close()
