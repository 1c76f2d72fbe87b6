"""NIXL's agent: the seam of the optional port, and its implementation by the wheel.

An agent registers memory, tells others by its metadata how to reach it, and reads what they have
registered. Here only receivers read: nobody writes into the memory of another process.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
from typing import Any, Protocol

from shared.background import item_error
from shared.errors import LinkLost

BACKEND = "UCX"


class Transfer(Protocol):
    def is_done(self) -> bool:
        """Makes progress. Raises LinkLost once it has failed: nothing of it arrives any more."""
        ...


class Agent(Protocol):
    """All calls come from one thread. They raise LinkLost."""

    def register(self, memory: mmap.mmap) -> int:
        """Registers memory that exists until the agent is closed. Returns its address."""
        ...

    def metadata(self) -> bytes:
        """Returns how to reach the agent and all that it has registered."""
        ...

    def connect(self, metadata: bytes) -> str:
        """Returns the name of the agent that has this metadata."""
        ...

    def read(self, peer: str, source: int, destination: int, num_bytes: int) -> Transfer:
        """Starts to read from the peer's memory at `source` into the own at `destination`."""
        ...

    def progress(self) -> None:
        """Serves the reads of others."""
        ...

    def close(self) -> None:
        """Forgets all memory and peers. No transfer may be under way. Idempotent."""
        ...


def load_nixl() -> Any:
    """Returns the wheel's module. Raises LinkLost if it is not installed or cannot be loaded."""
    try:
        module = importlib.import_module("nixl._api")
    except BaseException as raised:  # it also loads libraries of CUDA
        error = item_error(raised)
        raise LinkLost(f"{type(error).__name__}: {error}") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # else it prints to stdout
    return module


class NixlAgent:
    """An `Agent` of the wheel. Without a thread of NIXL's own, which would poll all the time."""

    def __init__(self, name: str) -> None:
        """Raises LinkLost."""
        module = load_nixl()
        self._registered: list[Any] = []
        self._peers: list[str] = []
        with _AsLinkLost("agent"):
            config = module.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
            self._agent: Any = module.nixl_agent(name, config)
            if BACKEND not in self._agent.backends:
                raise RuntimeError(f"this wheel has no {BACKEND}")

    def register(self, memory: mmap.mmap) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with _AsLinkLost("register"):
            found = self._agent.register_memory([(address, len(memory), 0, "")], "DRAM")
        self._registered.append(found)
        return address

    def metadata(self) -> bytes:
        with _AsLinkLost("metadata"):
            return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> str:
        with _AsLinkLost("connect"):
            name = self._agent.add_remote_agent(metadata)
            self._peers.append(name.decode() if isinstance(name, bytes) else str(name))
        return self._peers[-1]

    def read(self, peer: str, source: int, destination: int, num_bytes: int) -> Transfer:
        with _AsLinkLost("read"):
            own, theirs = (
                self._agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
                for address in (destination, source)
            )
            handle = self._agent.initialize_xfer("READ", own, theirs, peer)
            return _NixlTransfer(self._agent, handle, self._agent.transfer(handle))

    def progress(self) -> None:
        with _AsLinkLost("progress"):
            self._agent.get_new_notifs()

    def close(self) -> None:
        for each in self._peers:
            with _Ignored():
                self._agent.remove_remote_agent(each)
        for region in self._registered:
            with _Ignored():
                self._agent.deregister_memory(region)
        self._peers, self._registered, self._agent = [], [], None


class _NixlTransfer:
    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent, self._handle, self._state = agent, handle, state

    def is_done(self) -> bool:
        with _AsLinkLost("read"):
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
            if self._state == "ERR":
                raise RuntimeError("the transfer has failed")
        return self._state == "DONE"


class _AsLinkLost:
    """Raises errors of the wheel, which have no common type, as LinkLost."""

    def __init__(self, action: str) -> None:
        self._action = action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            reason = f"nixl {self._action}: {type(error).__name__}: {error}"
            raise LinkLost(reason) from error


class _Ignored:
    """Ignores errors of the wheel: what is to be forgotten may be gone already."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return isinstance(error, Exception)
