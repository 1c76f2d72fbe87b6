"""An `Agent` without the wheel: agents of one process, which read each other's registered memory.

Faults are those of a real one: it does not start, a peer cannot be reached, a read fails, never
ends, or ends late, and what is read was altered in the meantime.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from dataclasses import dataclass, field

from shared.errors import LinkLost
from shared.kv_wire.ports.nixl_agent import Transfer
from shared.kv_wire.ports.nixl_link import TOKEN_BYTES


@dataclass
class FakeNetwork:
    """All agents, and the faults of the next reads of frames; probes are spared."""

    agents: dict[bytes, FakeAgent] = field(default_factory=dict)
    is_broken: bool = False  # no agent starts
    is_apart: bool = False  # no agent reaches another
    are_probes_hanging: bool = False
    fails: bool = False
    hangs: bool = False  # until it is set to False
    under_way: list[FakeTransfer] = field(default_factory=list)
    num_started: int = 0

    def make(self) -> FakeAgent:
        if self.is_broken:
            raise LinkLost("nixl agent: no transport")
        self.num_started += 1
        agent = FakeAgent(self, f"agent-{self.num_started}".encode())
        self.agents[agent.name] = agent
        return agent

    @property
    def num_open(self) -> int:
        return len(self.agents)


class FakeAgent:
    def __init__(self, network: FakeNetwork, name: bytes) -> None:
        self.name = name
        self.network = network
        self.regions: list[tuple[int, int]] = []
        self.num_served = 0
        self._thread = threading.current_thread()

    def register(self, memory: mmap.mmap) -> int:
        self._check()
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.regions.append((address, len(memory)))
        return address

    def metadata(self) -> bytes:
        self._check()
        return self.name

    def connect(self, metadata: bytes) -> str:
        self._check()
        if self.network.is_apart or metadata not in self.network.agents:
            raise LinkLost("nixl connect: unreachable")
        return metadata.decode()

    def read(self, peer: str, source: int, destination: int, num_bytes: int) -> Transfer:
        self._check()
        assert self.covers(destination, num_bytes), "it reads into memory that it did not register"
        return FakeTransfer(self.network, peer.encode(), source, destination, num_bytes)

    def progress(self) -> None:
        self._check()
        self.num_served += 1

    def close(self) -> None:
        self._check()
        mine = [each for each in self.network.under_way if self.covers(each.destination, 1)]
        assert not mine, "a read is under way into memory that is given back"
        self.network.agents.pop(self.name, None)

    def covers(self, address: int, num_bytes: int) -> bool:
        ends = ((start, start + length) for start, length in self.regions)
        return any(start <= address and address + num_bytes <= end for start, end in ends)

    def _check(self) -> None:
        assert threading.current_thread() is self._thread, "an agent has one thread"


class FakeTransfer:
    def __init__(
        self, network: FakeNetwork, peer: bytes, source: int, destination: int, num_bytes: int
    ) -> None:
        self.network, self.peer, self.source = network, peer, source
        self.destination, self.num_bytes = destination, num_bytes
        network.under_way.append(self)

    def is_done(self) -> bool:
        network, is_probe = self.network, self.num_bytes == TOKEN_BYTES
        if network.are_probes_hanging if is_probe else network.hangs:
            return False
        network.under_way.remove(self)
        peer = network.agents.get(self.peer)
        if peer is None or (network.fails and not is_probe):
            raise LinkLost("nixl read: remote disconnect")
        assert peer.covers(self.source, self.num_bytes), "it reads what was not registered"
        ctypes.memmove(self.destination, self.source, self.num_bytes)
        return True
