"""Messages between a leader and its ranks, besides the steps: one datagram a message.

leader            rank
  ── StartRank ──▶   spawned
  ◀─ LoadingPhase ── as often as it changes
  ◀────── Ready ──   loaded, or Failed
  ── Go ─────────▶   all ranks are equal: it waits for steps; else GroupRejected
  ◀───── Failed ──   at any time, before it exits
  ◀ StepExtended ─   before it does what no step's budget allows for
  ◀── RankAlive ──   four times a second, from another host
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from shared.engine.parallel.links import RankLink
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.ring import RingFiles

OnLoading = Callable[["LoadingPhase"], None]
NO_RING = RingFiles(-1, (), 0, 0)
MAX_MESSAGE_BYTES = 128 * 1024  # limit of a datagram between two processes


class RankIdentity(msgspec.Struct, frozen=True):
    """Properties that must be equal at all ranks of a group before the first step."""

    weights_digest: str
    layout_key: str
    numerics: str
    versions: str


class StartRank(msgspec.Struct, frozen=True, tag="start"):
    rank: int
    tp: int
    pp: int
    entry: str  # module:name
    config: bytes
    transport: str
    limit_s: float
    hosts: tuple[str, ...]  # the host of each rank
    rendezvous: str = ""
    # The fields that follow are those of the rank's host.
    address: str = ""  # used by ranks of other hosts
    leader_pid: int = 0
    mesh_memory: int = -1
    steps: RingFiles = NO_RING
    step_reader: int = 0
    answers: RingFiles = NO_RING

    @property
    def shape(self) -> MeshShape:
        return MeshShape(self.tp, self.pp)


class Go(msgspec.Struct, frozen=True, tag="go"):
    pass


class GroupRejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The group does not start. The rank ends."""

    line: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    identity: RankIdentity
    links: tuple[RankLink, ...] = ()  # links that this rank has measured


class LoadingPhase(msgspec.Struct, frozen=True, tag="phase"):
    """What the rank does before it is ready."""

    phase: Literal["loading", "compiling"]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    line: str


class StepExtended(msgspec.Struct, frozen=True, tag="extended"):
    """The steps in flight may take `seconds` longer."""

    seconds: float


class RankAlive(msgspec.Struct, frozen=True, tag="alive"):
    """The rank's host runs, and will say how the rank ends."""


ToRank = StartRank | Go | GroupRejected
ToLeader = LoadingPhase | Ready | Failed | StepExtended | RankAlive
_to_rank = msgspec.msgpack.Decoder(ToRank)
_to_leader = msgspec.msgpack.Decoder(ToLeader)


def encode(message: ToRank | ToLeader) -> bytes:
    """Raises ValueError for a message that no datagram carries."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        name = type(message).__name__
        raise ValueError(f"{name} has {len(data)} bytes: at most {MAX_MESSAGE_BYTES}")
    return data


def decode_to_rank(data: bytes) -> ToRank:
    return _to_rank.decode(data)


def decode_to_leader(data: bytes) -> ToLeader:
    """Raises msgspec.DecodeError."""
    return _to_leader.decode(data)


def difference(identities: Sequence[RankIdentity]) -> str | None:
    """Returns a line that names the rank that differs from most others, and what
    differs. None if none.
    """
    for name in RankIdentity.__struct_fields__:
        values = [getattr(each, name) for each in identities]
        usual = max(values, key=values.count)
        for rank, value in enumerate(values):
            if value != usual:
                others = "the other ranks have" if values.count(usual) > 1 else "another rank has"
                label = name.replace("_", " ")
                return f"rank {rank} has {label} {value!r}, {others} {usual!r}"
    return None
