"""Limits of open connections: of all, and of those from one address without a valid API key.

A connection counts for its address until a request on it has authenticated. Many may open at once,
as clients behind one proxy do, but after `GRACE_S` only `MAX_WITHOUT_KEY` of an address stay.
"""

from __future__ import annotations

from collections import Counter

MAX_CONNECTIONS = 8192
MAX_WITHOUT_KEY = 64
MAX_OPENING = 1024  # without a key, from one address, during GRACE_S
GRACE_S = 2.0


class Connections:
    def __init__(
        self,
        *,
        max_connections: int = MAX_CONNECTIONS,
        max_without_key: int = MAX_WITHOUT_KEY,
        max_opening: int = MAX_OPENING,
        grace_s: float = GRACE_S,
    ) -> None:
        self.grace_s = grace_s
        self._max_connections = max_connections
        self._max_without_key = max_without_key
        self._max_opening = max_opening
        self._num_open = 0
        self._without_key: Counter[str] = Counter()

    def opened(self, address: str) -> bool:
        """Counts a connection. False: it must be closed, and `closed` still follows."""
        self._num_open += 1
        self._without_key[address] += 1
        is_within = self._num_open <= self._max_connections
        return is_within and self._without_key[address] <= self._max_opening

    def may_stay(self, address: str) -> bool:
        """Whether a connection without a key may stay open after `grace_s`."""
        return self._without_key[address] <= self._max_without_key

    def authenticated(self, address: str) -> None:
        """One connection of this address has a valid key. Call once for a connection."""
        self._without_key[address] -= 1
        if not self._without_key[address]:
            del self._without_key[address]

    def closed(self, address: str, *, has_key: bool) -> None:
        self._num_open -= 1
        if not has_key:
            self.authenticated(address)
