"""Joins hosts to the ranks of a worker: the leader listens, each other host opens its connections.

    steps     one a host: steps to it, answers from it
    control   one a rank: the messages of `rank_messages.py`
    kv        one a rank, which the rank itself reads
    masks     one, of the answering rank

A host proves that it has the key of its assignment, which it gets on another, encrypted way, and
the leader replies whether the connection has joined. What follows is neither encrypted nor
authenticated: it is for networks that the operator trusts.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from socket import gethostname

import msgspec

from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.frames import ConnectionLost, FrameSocket
from shared.engine.parallel.processes.watchdog import GroupLost

KEY_BYTES = NONCE_BYTES = 32
HELLO_S = 2.0  # time for a connection to prove itself
POLL_S = 0.1
SEND_S = 30.0
JOINED = b""  # the reply to a connection that has joined; to others, a reason
JOIN_S = 4.0  # a host without a connection after it loses its ranks to the next that asks

Role = tuple[str, int]  # kind, rank


class JoinHello(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    rank: int
    proof: bytes


@dataclass
class HostConnections:
    """The connections of one host, which runs `ranks`, at either end. `key` is of this assignment:
    a host that lost these ranks to another one does not have it.
    """

    name: str
    ranks: range
    sockets: dict[Role, socket.socket] = field(default_factory=dict)
    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)
    assigned_at: float = field(default_factory=time.monotonic)

    @property
    def steps(self) -> socket.socket:
        return self.sockets["steps", self.ranks.start]

    def close(self) -> None:
        for each in self.sockets.values():
            each.close()


def roles_of(ranks: range, shape: MeshShape) -> Iterator[Role]:
    yield "steps", ranks.start
    for rank in ranks:
        yield "control", rank
        yield "kv", rank
    if shape.answering_rank in ranks:
        yield "masks", shape.answering_rank


class HostListener:
    """Accepts other hosts at the leader: they run the last `num_ranks` ranks of the group. A host
    that opens no connection within `join_s` may never come. Raises OSError for an address that is
    not this host's.
    """

    def __init__(
        self, host: str, shape: MeshShape, num_ranks: int, *, join_s: float = JOIN_S
    ) -> None:
        self.host, self.shape = host, shape
        self._socket = socket.create_server((host, 0))
        self._socket.settimeout(POLL_S)
        self._hosts: list[HostConnections] = []
        self._late: list[HostConnections] = []  # hosts that lost their ranks
        self._ranks = range(shape.num_ranks - num_ranks, shape.num_ranks)
        self._join_s = join_s
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def num_missing(self) -> int:
        return len(self._ranks) - sum(len(each.ranks) for each in self._hosts)

    def assign(self, name: str, num_ranks: int) -> HostConnections:
        """The next ranks are this host's. Raises ValueError if fewer are missing."""
        with self._lock:
            oldest = time.monotonic() - self._join_s
            late = [each for each in self._hosts if not each.sockets and each.assigned_at <= oldest]
            self._late += late
            self._hosts = [each for each in self._hosts if each not in late]
            ranks = self._missing_ranks(num_ranks)
            if ranks is None:
                raise ValueError(f"{name} offers {num_ranks} ranks: {self.num_missing} are missing")
            if name in {gethostname(), *(each.name for each in self._hosts)}:
                name = f"{name} ({ranks.start})"
            host = HostConnections(name, ranks)
            self._hosts.append(host)
            return host

    def accept(self, limit_s: float) -> list[HostConnections]:
        """Returns once all hosts have all their connections. Raises GroupLost after the limit."""
        deadline = time.monotonic() + limit_s
        while (missing := self._missing()) is not None:
            if self._is_closed or time.monotonic() > deadline:
                raise GroupLost(f"{missing} after {limit_s:g} s")
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # closed
                raise GroupLost(f"no longer listening: {missing}") from None
            self._admit(connection)
        return sorted(self._hosts, key=lambda each: each.ranks.start)

    def _missing_ranks(self, count: int) -> range | None:
        """Returns the first `count` ranks, one after the other, that no host has."""
        assigned = {rank for each in self._hosts for rank in each.ranks}
        firsts = range(self._ranks.start, self._ranks.stop - count + 1) if count > 0 else ()
        found = (range(first, first + count) for first in firsts)
        return next((each for each in found if assigned.isdisjoint(each)), None)

    def _missing(self) -> str | None:
        with self._lock:
            if self.num_missing:
                return f"{self.num_missing} ranks of other hosts have not joined"
            for host in self._hosts:
                if missing := self._open_roles(host):
                    return f"{host.name} has not opened {missing[0][0]} of rank {missing[0][1]}"
        return None

    def _open_roles(self, host: HostConnections) -> list[Role]:
        roles = roles_of(host.ranks, self.shape)
        return [each for each in roles if each not in host.sockets]

    def _admit(self, connection: socket.socket) -> None:
        """Closes a connection that does not prove itself, that no host needs, or that is late."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        frames = FrameSocket(connection, HELLO_S)
        try:
            frames.send(nonce)
            hello = msgspec.msgpack.decode(frames.receive(HELLO_S), type=JoinHello)
            role = hello.kind, hello.rank
            with self._lock:
                host = _proven(self._hosts, hello.proof, nonce, role)
                if host is not None and role in self._open_roles(host):
                    frames.send(JOINED)
                    FrameSocket(connection, SEND_S)
                    host.sockets[role] = connection
                    return
                late = _proven(self._late, hello.proof, nonce, role)
            if late is not None:
                frames.send(self._lateness(late).encode())
        except (ConnectionLost, msgspec.DecodeError):
            pass
        connection.close()

    def _lateness(self, late: HostConnections) -> str:
        ranks = ", ".join(map(str, late.ranks))
        return f"this host has lost ranks {ranks}: it opened no connection in {self._join_s:g} s"

    def close(self) -> None:
        """Stops listening. The connections that `accept` has returned stay open."""
        self._is_closed = True
        self._socket.close()


def open_connections(
    address: tuple[str, int], key: bytes, name: str, ranks: range, shape: MeshShape
) -> HostConnections:
    """Connects another host to the leader. Raises GroupLost."""
    host = HostConnections(name, ranks, key=key)
    try:
        for role in roles_of(ranks, shape):
            host.sockets[role] = connection = socket.create_connection(address, SEND_S)
            frames = FrameSocket(connection, SEND_S)
            nonce = frames.receive(SEND_S)
            frames.send(msgspec.msgpack.encode(JoinHello(*role, _proof(key, nonce, role))))
            # nothing follows it on the last connection before this host's ranks run
            if (reply := frames.receive(SEND_S)) != JOINED:
                raise ConnectionLost(reply.decode(errors="replace"))
    except (OSError, ConnectionLost) as error:
        host.close()
        raise GroupLost(f"cannot join ranks at {address[0]}:{address[1]}: {error}") from None
    return host


def _proven(
    hosts: Iterable[HostConnections], proof: bytes, nonce: bytes, role: Role
) -> HostConnections | None:
    """Returns the host whose key and ranks the proof shows."""
    return next(
        (
            each
            for each in hosts
            if role[1] in each.ranks and hmac.compare_digest(proof, _proof(each.key, nonce, role))
        ),
        None,
    )


def _proof(key: bytes, nonce: bytes, role: Role) -> bytes:
    return hmac.digest(key, nonce + f"{role[0]} {role[1]}".encode(), "sha256")
