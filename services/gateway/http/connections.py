"""Limits the open connections: of all, of each tenant, and of addresses without a valid API key.

    opened ──authenticated──▶ held by the tenant ─┐
      │ held by the address                       ├──lost, or evicted while idle──▶ gone
      └──all others are busy──▶ reserved ─────────┘

A connection counts for its address until a request on it has authenticated, then for the tenant of
the last request. Beyond the total limit, the holder with the most connections loses the one that
has been idle longest. If none is idle, the new connection is a reserved one, which only serves
probes.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable

from shared.errors import Overloaded

MAX_CONNECTIONS = 8192
MAX_WITHOUT_KEY = 64
MAX_OPENING = 1024  # connections of one address without a key, during GRACE_S
MAX_RESERVED = 32
GRACE_S = 2.0
SPARE_DESCRIPTORS = 512  # pipes, files, Redis and NATS, and connections that are being closed

Holder = tuple[str, str]  # "address" and an address, or "tenant" and a tenant's id


def connections_within(num_descriptors: int) -> int:
    """Returns the maximum number of connections of a process that may open so many descriptors,
    without the reserved ones.
    """
    spare = min(SPARE_DESCRIPTORS, num_descriptors // 4)
    return max(1, min(MAX_CONNECTIONS, num_descriptors - spare - MAX_RESERVED))


class Connections:
    """The open connections of a gateway. If `max_connections` is None, the process's descriptors
    limit them.
    """

    def __init__(
        self,
        *,
        max_connections: int | None = None,
        max_without_key: int = MAX_WITHOUT_KEY,
        max_opening: int = MAX_OPENING,
        max_reserved: int = MAX_RESERVED,
        grace_s: float = GRACE_S,
    ) -> None:
        if max_connections is None:
            max_connections = connections_within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self.grace_s = grace_s
        self.max_connections = max_connections
        self.max_of_tenant = max(1, max_connections // 4)
        self._max_without_key = max_without_key
        self._max_opening = min(max_opening, max(1, max_connections // 2))
        self._max_reserved = max_reserved
        self._num_held: Counter[Holder] = Counter()
        self._num_open = 0  # excludes reserved connections
        self._idle: dict[Holder, dict[OpenConnection, None]] = {}  # longest idle first
        self._reserved: dict[OpenConnection, None] = {}  # oldest first

    def open(self, address: str, close: Callable[[], None]) -> OpenConnection | None:
        """Returns a new connection, or None if it must be closed. `close` is called if it is
        evicted.
        """
        holder = ("address", address)
        if self._num_held[holder] >= self._max_opening:
            return None
        connection = OpenConnection(self, holder, close)
        if self._num_open >= self.max_connections and not self._evict_of_largest():
            return self._reserve(connection)
        self._hold(connection)
        self._set_idle(connection)
        return connection

    def may_stay(self, connection: OpenConnection) -> bool:
        """Whether a connection may stay open after `grace_s`: with a key, or if its address has
        few.
        """
        return connection.has_key or self._num_held[connection.holder] <= self._max_without_key

    # ── called by OpenConnection ─────────────────────────────────────────────────────────────────

    def move(self, connection: OpenConnection, holder: Holder) -> None:
        """Moves a connection to its tenant. Raises Overloaded if the tenant has as many as it may,
        none of them idle.
        """
        if self._num_held[holder] >= self.max_of_tenant and not self._evict_of(holder):
            raise Overloaded(
                f"this tenant has {self.max_of_tenant} open connections", retry_after_s=1.0
            )
        self._release(connection)
        connection.holder = holder
        self._hold(connection)

    def set_busy(self, connection: OpenConnection) -> None:
        idle = self._idle.get(connection.holder, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(connection.holder, None)

    def _set_idle(self, connection: OpenConnection) -> None:
        self._idle.setdefault(connection.holder, {})[connection] = None

    def set_idle(self, connection: OpenConnection) -> None:
        if not connection.is_reserved:
            self._set_idle(connection)

    def remove(self, connection: OpenConnection) -> None:
        self.set_busy(connection)
        if connection.is_reserved:
            self._reserved.pop(connection, None)
        else:
            self._release(connection)

    # ─────────────────────────────────────────────────────────────────────────────────────────────

    def _hold(self, connection: OpenConnection) -> None:
        self._num_open += 1
        self._num_held[connection.holder] += 1

    def _release(self, connection: OpenConnection) -> None:
        self._num_open -= 1
        self._num_held[connection.holder] -= 1
        if not self._num_held[connection.holder]:
            del self._num_held[connection.holder]

    def _evict_of_largest(self) -> bool:
        holder = max(self._idle, key=self._num_held.__getitem__, default=None)
        return holder is not None and self._evict_of(holder)

    def _evict_of(self, holder: Holder) -> bool:
        """Evicts the holder's longest idle connection. Returns False if none is idle."""
        evicted = next(iter(self._idle.get(holder, ())), None)
        if evicted is not None:
            evicted.evict()
        return evicted is not None

    def _reserve(self, connection: OpenConnection) -> OpenConnection:
        connection.is_reserved = True
        if len(self._reserved) >= self._max_reserved:
            next(iter(self._reserved)).evict()
        self._reserved[connection] = None
        return connection


class OpenConnection:
    """One open connection. A connection with `is_reserved` only serves probes."""

    def __init__(self, connections: Connections, holder: Holder, close: Callable[[], None]) -> None:
        self._connections = connections
        self._close = close
        self._is_gone = False
        self.holder = holder
        self.has_key = False
        self.is_reserved = False

    def begin(self) -> None:
        """Records that a request arrives."""
        self._connections.set_busy(self)

    def end(self) -> None:
        """Records that all requests are answered."""
        if not self._is_gone:
            self._connections.set_idle(self)

    def authenticate(self, tenant_id: str) -> None:
        """Records a request with a valid key of this tenant; call between `begin` and `end`. Raises
        Overloaded, and changes nothing, if the tenant has too many connections.
        """
        holder = ("tenant", tenant_id)
        if holder != self.holder and not self._is_gone and not self.is_reserved:
            self._connections.move(self, holder)
        self.has_key = True

    def evict(self) -> None:
        self.lose()
        self._close()

    def lose(self) -> None:
        """Records the end of the connection. Idempotent."""
        if not self._is_gone:
            self._is_gone = True
            self._connections.remove(self)
