"""The store seam: the few Redis operations that Hearth uses, with a bound on every wait.

Redis is never awaited between submit and first token except for tenant limits and an API key that
is not cached yet, so each call takes at most `timeout_s`. After a failure the circuit breaker fails
every call immediately for `BREAKER_S`, so that requests do not wait. An error reply of Redis does
not open the breaker: one bad record must not make Redis unavailable to all requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec
import redis.asyncio
import redis.exceptions
from redis.commands.core import AsyncScript

from shared.clock import Clock
from shared.errors import DependencyUnavailable

STORE_TIMEOUT_S = 0.05
BREAKER_S = 0.5

# One write of a batch, in Redis's syntax: ("HSET", key, field, value, …).
Command = Sequence[str | bytes | int | float]

# ARGV: commands as msgpack. All are run, then the first error is returned. redis-py takes some
# 10 µs of CPU for each command of a pipeline, more than Redis takes for the complete record.
DO_ALL = """
local failed
for _, command in ipairs(cmsgpack.unpack(ARGV[1])) do
  local is_called, reply = pcall(function() return redis.pcall(unpack(command)) end)
  if not is_called then reply = {err = 'ERR ' .. tostring(reply)} end
  if type(reply) == 'table' and reply.err then failed = failed or reply end
end
return failed or redis.status_reply('OK')
"""
_encode = msgspec.msgpack.Encoder().encode


class StoreUnavailable(DependencyUnavailable):
    code = "store_unavailable"


class StoreRejected(StoreUnavailable):
    """Redis returned an error reply: for example, a record has the wrong type."""

    code = "store_refused"


class Store(Protocol):
    """Every method raises StoreUnavailable if Redis does not answer in time."""

    async def get(self, key: str) -> bytes | None: ...

    async def hash_get(self, key: str) -> Mapping[bytes, bytes]: ...

    async def sorted_set_head(self, key: str, count: int) -> Sequence[bytes]:
        """The `count` members with the lowest scores."""
        ...

    async def sorted_set_size(self, key: str) -> int: ...

    async def write(self, commands: Sequence[Command]) -> None:
        """Runs all in one round trip; a failed command does not stop the others."""
        ...

    async def evaluate(
        self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int | float]
    ) -> Any:
        """Runs a Lua script atomically in one round trip. Strings in its reply are bytes."""
        ...

    async def close(self) -> None: ...


class RedisStore:
    def __init__(self, url: str, clock: Clock, *, timeout_s: float = STORE_TIMEOUT_S) -> None:
        """Connects lazily: a missing Redis fails the first call, not the start."""
        self._clock = clock
        self._closed_until = 0.0
        self._scripts: dict[str, AsyncScript] = {}
        self._redis = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=None,
            health_check_interval=0,
        )

    async def get(self, key: str) -> bytes | None:
        return cast("bytes | None", await self._guard(self._redis.get(key)))

    async def hash_get(self, key: str) -> Mapping[bytes, bytes]:
        return cast("Mapping[bytes, bytes]", await self._guard(self._redis.hgetall(key)))

    async def sorted_set_head(self, key: str, count: int) -> Sequence[bytes]:
        return cast("Sequence[bytes]", await self._guard(self._redis.zrange(key, 0, count - 1)))

    async def sorted_set_size(self, key: str) -> int:
        return cast("int", await self._guard(self._redis.zcard(key)))

    async def write(self, commands: Sequence[Command]) -> None:
        await self.evaluate(DO_ALL, [], [_encode([_as_text(each) for each in commands])])

    async def evaluate(
        self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int | float]
    ) -> Any:
        known = self._scripts.get(script)
        if known is None:  # redis-py sends its digest, and the text only if Redis lacks the script
            known = self._scripts[script] = self._redis.register_script(script)
        return await self._guard(known(keys=keys, args=arguments))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _guard(self, call: Awaitable[object]) -> object:
        if self._clock.now() < self._closed_until:
            close = getattr(call, "close", None)
            if close is not None:
                close()
            raise StoreUnavailable("Redis is unavailable")
        try:
            return await call
        except redis.exceptions.ResponseError as error:
            raise StoreRejected(f"Redis returned an error: {error}") from error
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            self._closed_until = self._clock.now() + BREAKER_S
            raise StoreUnavailable(f"Redis does not answer: {error!r}") from error


def _as_text(command: Command) -> list[str | msgspec.Raw]:
    """Numbers become decimal strings, because Lua's numbers have 53 bits. Bytes become msgpack
    strings, valid UTF-8 or not, because Redis's cmsgpack supports no binary type.
    """
    return [_as_raw(part) if isinstance(part, bytes) else str(part) for part in command]


def _as_raw(part: bytes) -> msgspec.Raw:
    return msgspec.Raw(b"\xdb" + len(part).to_bytes(4, "big") + part)
