"""Reads Redis's memory, and bounds the part of it that stored responses and prefixes may take.

Redis holds limits, keys and usage as well, and with `noeviction` a full one rejects every write. So
responses may take half of its `maxmemory`, and prefixes a quarter. `maxmemory` is read again every
READ_S, since it may be changed while Redis runs.
"""

from __future__ import annotations

from services.gateway.observability.metrics.redis import MemoryUse
from shared.clock import Clock
from shared.store import Store, StoreUnavailable, reading_reply

READ_S = 5.0
USUAL_MAX_BYTES = 1 << 30  # used if Redis has no readable `maxmemory`

READ_MEMORY = "return redis.call('INFO', 'memory')"


class RedisMemory:
    """The memory of one Redis. `max_response_bytes` and `max_prefix_bytes` are limits over all
    tenants; 0 means a share of Redis's memory.
    """

    def __init__(
        self, store: Store, clock: Clock, *, max_response_bytes: int = 0, max_prefix_bytes: int = 0
    ) -> None:
        self._store = store
        self._clock = clock
        self._max_response_bytes = max_response_bytes
        self._max_prefix_bytes = max_prefix_bytes
        self.use: MemoryUse | None = None  # None while unknown
        self._max_bytes = 0  # 0 if Redis has no limit

    @property
    def max_response_bytes(self) -> int:
        return self._max_response_bytes or (self._max_bytes or USUAL_MAX_BYTES) // 2

    @property
    def max_prefix_bytes(self) -> int:
        return self._max_prefix_bytes or (self._max_bytes or USUAL_MAX_BYTES) // 4

    async def run(self) -> None:
        while True:
            await self.read()
            await self._clock.sleep(READ_S)

    async def read(self) -> None:
        """Reads the memory's use and limit. If Redis does not reply, the last limit stays valid."""
        try:
            reply = await self._store.evaluate(READ_MEMORY, [], [])
            with reading_reply():
                self.use = _memory_use(reply)
        except StoreUnavailable:
            self.use = None
            return
        self._max_bytes = self.use.limit


def _memory_use(reply: bytes) -> MemoryUse:
    lines = (line.split(b":") for line in reply.splitlines() if line.count(b":") == 1)
    fields = {name: value for name, value in lines if value.isdigit()}
    return MemoryUse(int(fields.get(b"used_memory", 0)), int(fields.get(b"maxmemory", 0)))
