"""The store seam: the few Redis operations that Hearth uses, with a bound on every wait.

Redis is never awaited between submit and first token except for tenant limits and an API key that
is not cached yet. While Redis answers, a call waits for MAX_STORE_TIMEOUT_S: after one late reply
each gateway would count limits alone. Time that the event loop spends on other work does not count:
a burst of requests must not make Redis look away. After a failure the circuit breaker fails every
call immediately for `BREAKER_S`, so that requests do not wait; until Redis answers again, the next
ones wait for a time that follows the measured round trip, from STORE_TIMEOUT_S. A call that takes
longer goes on without its caller: a new connection to a distant Redis is established by then, and
its round trip is measured. MAX_AT_ONCE calls wait for Redis; the others wait for one of these to
end, without a connection of their own: a burst would spend seconds on opening them. An error reply
of Redis does not open the breaker: one bad record must not make Redis unavailable to all requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, Protocol, cast

import msgspec
import redis.asyncio
import redis.exceptions
from redis.commands.core import AsyncScript

from shared.background import start_awaited
from shared.clock import Clock
from shared.errors import ConfigError, DependencyUnavailable
from shared.messages import StoreLoad
from shared.tls import TlsFiles
from shared.transport.round_trips import RoundTrip

STORE_TIMEOUT_S = 0.05
MAX_STORE_TIMEOUT_S = 0.5
ABANDONED_S = 5.0  # then a step of a call ends, though its caller has given up before
# Slices of a wait; one counts the same however late the event loop comes back from it
NUM_SLICES = 10
# Round trips of a call on a new connection: TCP, HELLO, CLIENT SETINFO, the command
NUM_ROUND_TRIPS = 4
BREAKER_S = 0.5
MAX_AT_ONCE = 256  # calls that wait: those of four tenants, which have 64 each for their limits
MAX_CONNECTIONS = 16 * MAX_AT_ONCE  # more than those of calls that wait, or were given up
# Redis takes reads alone: it cannot save, has no memory, is a replica, or lacks replicas. Scripts
# return these codes within other text.
WRITE_REJECTIONS = ("MISCONF", "OOM", "READONLY", "NOREPLICAS")
REJECTION_SHOWN_S = 30.0  # time since the last such reply: not every successful call writes

NEW_REDIS = "Redis is new, no tenant yet: hearth tenant add"

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

    @property
    def public_message(self) -> str:
        return "Redis answered with an error"  # Redis's own text names scripts, keys and disks


@contextlib.contextmanager
def reading_reply() -> Iterator[None]:
    """Raises StoreRejected for a reply that is not what its script returns: another program, or
    another version of the script, answers.
    """
    try:
        yield
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StoreRejected(f"Redis's reply cannot be read: {error!r}") from error


class Store(Protocol):
    """Every method raises StoreUnavailable if Redis does not answer in time."""

    async def get(self, key: str) -> bytes | None: ...

    async def hash_get(self, key: str) -> Mapping[bytes, bytes]: ...

    async def sorted_set_head(self, key: str, count: int) -> Sequence[bytes]:
        """Returns the `count` members with the lowest scores."""
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

    def load(self) -> StoreLoad: ...

    async def close(self) -> None: ...


class TlsConnection(redis.asyncio.SSLConnection):
    """Reads the files of TLS each time it connects: redis-py does so once for each place in its
    pool, and trusts the authorities of the system beside a named one.
    """

    def __init__(self, *, tls: TlsFiles, **options: Any) -> None:
        super().__init__(**options)
        self._tls = tls

    def _connection_arguments(self) -> Mapping[str, Any]:
        try:
            return {**super()._connection_arguments(), "ssl": self._tls.context()}
        except ConfigError as error:  # half replaced
            raise OSError(error.message) from None


def redis_client(url: str, tls: TlsFiles | None, **options: Any) -> redis.asyncio.Redis:
    """Returns a client that connects when it is used. A rediss:// URL sends its password only to a
    server whose certificate and name are verified. Raises ConfigError for an invalid URL.
    """
    is_encrypted = url.startswith("rediss://")
    if is_encrypted:
        options["tls"] = tls or TlsFiles()
    try:
        client = redis.asyncio.Redis.from_url(url, **options)
    except ValueError as error:
        raise ConfigError(f"redis_url: {error}") from None
    if is_encrypted:
        client.connection_pool.connection_class = TlsConnection
    return client


class RedisStore:
    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        timeout_s: float | None = None,
        tls: TlsFiles | None = None,
        max_at_once: int = MAX_AT_ONCE,
    ) -> None:
        """Connects lazily: a missing Redis fails the first call, not the start. Without a
        `timeout_s`, in seconds, calls wait as the module says.
        """
        self._clock = clock
        self._timeout_s = timeout_s
        self._round_trip = RoundTrip()
        self._calls: set[asyncio.Future[object]] = set()  # includes those given up
        self._room = asyncio.Semaphore(max_at_once)
        self._closed_until = 0.0
        self._rejects_writes_until = 0.0
        self._is_away = False
        self._num_failures = self._num_reconnects = 0
        self._scripts: dict[str, AsyncScript] = {}
        longest_s = max(ABANDONED_S, timeout_s or 0.0)
        self._redis = redis_client(
            url,
            tls,
            socket_timeout=longest_s,
            socket_connect_timeout=longest_s,
            retry=None,
            health_check_interval=0,
            max_connections=MAX_CONNECTIONS,
        )

    async def get(self, key: str) -> bytes | None:
        return cast("bytes | None", await self._guard(lambda: self._redis.get(key)))

    async def hash_get(self, key: str) -> Mapping[bytes, bytes]:
        return cast("Mapping[bytes, bytes]", await self._guard(lambda: self._redis.hgetall(key)))

    async def sorted_set_head(self, key: str, count: int) -> Sequence[bytes]:
        return cast(
            "Sequence[bytes]", await self._guard(lambda: self._redis.zrange(key, 0, count - 1))
        )

    async def sorted_set_size(self, key: str) -> int:
        return cast("int", await self._guard(lambda: self._redis.zcard(key)))

    async def write(self, commands: Sequence[Command]) -> None:
        await self.evaluate(DO_ALL, [], [_encode([_as_text(each) for each in commands])])

    async def evaluate(
        self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int | float]
    ) -> Any:
        if script not in self._scripts:
            self._scripts[script] = self._redis.register_script(script)
        run = self._scripts[script]  # sends its digest, and the text only if Redis lacks the script
        return await self._guard(lambda: run(keys=keys, args=arguments))

    async def close(self) -> None:
        self._closed_until = inf  # calls that wait for others must not connect again
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._redis.aclose()

    def load(self) -> StoreLoad:
        return StoreLoad(
            is_away=self._is_away,
            num_failures=self._num_failures,
            num_reconnects=self._num_reconnects,
            rejects_writes=self._clock.now() < self._rejects_writes_until,
        )

    @property
    def wait_s(self) -> float:
        """The time that a call waits for its reply, in seconds."""
        if self._timeout_s is not None:
            return self._timeout_s
        if not self._is_away:
            return MAX_STORE_TIMEOUT_S
        measured_s = NUM_ROUND_TRIPS * self._round_trip.estimate_s
        return min(STORE_TIMEOUT_S + measured_s, MAX_STORE_TIMEOUT_S)

    async def _guard(self, call: Callable[[], Awaitable[object]]) -> object:
        self._check_breaker()
        async with self._room:
            self._check_breaker()  # a call before this one may have opened it
            return await self._answer(call)

    def _check_breaker(self) -> None:
        if self._clock.now() < self._closed_until:
            raise StoreUnavailable("Redis is unavailable")

    async def _answer(self, call: Callable[[], Awaitable[object]]) -> object:
        wait_s = self.wait_s
        task = self._started(call)
        try:
            if not await _ends_within(task, wait_s):
                raise TimeoutError(f"no reply within {wait_s:.3g} s")
            reply = task.result()
        except redis.exceptions.ResponseError as error:
            self._has_answered()
            if any(code in str(error) for code in WRITE_REJECTIONS):
                self._rejects_writes_until = self._clock.now() + REJECTION_SHOWN_S
            raise StoreRejected(f"Redis returned an error: {error}") from error
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            self._closed_until = self._clock.now() + BREAKER_S
            self._is_away = True
            self._num_failures += 1
            raise StoreUnavailable(f"Redis does not answer: {error!r}") from error
        self._has_answered()
        return reply

    def _has_answered(self) -> None:
        self._num_reconnects += self._is_away
        self._is_away = False

    def _started(self, call: Callable[[], Awaitable[object]]) -> asyncio.Future[object]:
        began_at = self._clock.now()

        def end(task: asyncio.Future[object]) -> None:
            self._calls.discard(task)
            if not task.cancelled() and task.exception() is None:
                self._round_trip.add(self._clock.now() - began_at)

        task = start_awaited(call(), redis.exceptions.RedisError, OSError)
        self._calls.add(task)
        task.add_done_callback(end)
        return task


async def _ends_within(task: asyncio.Future[object], wait_s: float) -> bool:
    for _ in range(NUM_SLICES):
        await asyncio.wait({task}, timeout=wait_s / NUM_SLICES)
        if task.done():
            return True
    return False


def _as_text(command: Command) -> list[str | msgspec.Raw]:
    """Numbers become decimal strings, because Lua's numbers have 53 bits. Bytes become msgpack
    strings, valid UTF-8 or not, because Redis's cmsgpack supports no binary type.
    """
    return [_as_raw(part) if isinstance(part, bytes) else str(part) for part in command]


def packed_for_lua(value: Any) -> bytes:
    """Returns msgpack of lists of strings, bytes and whole numbers, for `cmsgpack.unpack`."""
    return _encode(_raw_parts(value))


def _raw_parts(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_raw_parts(each) for each in value]
    return _as_raw(value) if isinstance(value, bytes) else value


def _as_raw(part: bytes) -> msgspec.Raw:
    return msgspec.Raw(b"\xdb" + len(part).to_bytes(4, "big") + part)
