"""NIXL as a port of a process: whether it works here, and the ends of its links."""

from __future__ import annotations

import asyncio

import structlog

from shared.errors import LinkLost
from shared.kv_wire.frames import NixlOffer
from shared.kv_wire.link import PageLock
from shared.kv_wire.ports.nixl_agent import Agent, NixlAgent
from shared.kv_wire.ports.nixl_link import MakeAgent, NixlReads, NixlSlots
from shared.kv_wire.ports.nixl_thread import NixlThread
from shared.randomness import Randomness, SystemRandomness

log = structlog.get_logger(__name__)

START_S = 30.0  # to load the wheel's libraries
OPEN_S = 5.0
PROBE_S = 2.0  # which a sender awaits its Welcome longer


async def start_nixl(kv_transport: str) -> NixlPort | None:
    """Returns the port if it is configured and works here."""
    return await NixlPort.start() if kv_transport == "nixl" else None


class NixlPort:
    """Construct with `start`. One for the links of a dialer or of a server."""

    def __init__(self, thread: NixlThread, make: MakeAgent) -> None:
        self._thread = thread
        self._make = make

    @classmethod
    async def start(
        cls, make: MakeAgent | None = None, randomness: Randomness | None = None
    ) -> NixlPort | None:
        """Tries an agent. Returns None, after one line in the log, if that fails: the own ports
        serve.
        """
        source = SystemRandomness() if randomness is None else randomness

        def named() -> Agent:
            return NixlAgent(f"hearth-{source.bytes(16).hex()}")

        port = cls(NixlThread(), named if make is None else make)
        try:
            async with asyncio.timeout(START_S):
                agent = await port._thread.call(port._make)
                await port._thread.call(agent.close)
        except (LinkLost, TimeoutError) as error:
            reason = "it does not start" if isinstance(error, TimeoutError) else str(error)
            log.warning("kv_transport_unavailable", port="nixl", reason=reason, instead="tcp")
            port.close()
            return None
        return port

    async def open_slots(self, slot_bytes: int, page_lock: PageLock | None = None) -> NixlSlots:
        """Returns the slots of a new link. Raises LinkLost."""
        try:
            async with asyncio.timeout(OPEN_S):
                return await NixlSlots.open(self._thread, self._make, slot_bytes, page_lock)
        except TimeoutError:
            raise LinkLost(f"no agent within {OPEN_S:g} s") from None

    async def open_reads(self, offer: NixlOffer, page_lock: PageLock | None = None) -> NixlReads:
        """Returns the receiver's end of a new link. Raises LinkLost."""
        return await NixlReads.open(self._thread, self._make, offer, page_lock, timeout_s=PROBE_S)

    def close(self) -> None:
        self._thread.close()
