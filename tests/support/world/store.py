"""Redis in a dictionary: only the commands that Hearth uses; an unknown one is an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from functools import partial
from math import inf
from typing import Any, TypeVar

from shared.messages import StoreLoad
from shared.store import (
    BREAKER_S,
    MAX_STORE_TIMEOUT_S,
    STORE_TIMEOUT_S,
    Command,
    StoreRejected,
    StoreUnavailable,
)
from tests.support.world.process import ProcessClock, SimulatedProcess
from tests.support.world.scripts import SCRIPTS

T = TypeVar("T")

LATENCY_S = 0.0003


def _encoded(value: str | bytes | int | float) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


class MemoryStore:
    """A store in memory. While `is_away` is True every call fails, as with a dead Redis.

    A hanging store executes its pending commands when it resumes, though no caller waits for them
    any more. Expiry is recorded, but carried out of `SET … EX` alone.
    """

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.time_to_live_s: dict[str, int] = {}
        self._ends_at: dict[str, float] = {}
        self.num_writes = 0
        self.is_away = False
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._commands: dict[str, Callable[..., None]] = {
            "SET": self._set,
            "SETNX": self._set_new,
            "DEL": self._delete,
            "EXPIRE": self._expire,
            "INCRBY": self._increase,
            "HSET": self._hash_set,
            "HSETNX": self._hash_set_new,
            "HINCRBY": self._hash_increase,
            "HDEL": self._hash_delete,
            "ZADD": self._sorted_add,
            "ZREM": self._sorted_remove,
            "ZREMRANGEBYSCORE": self._sorted_remove_range,
            "XADD": self._stream_add,
        }

    @property
    def is_hanging(self) -> bool:
        return not self._resumed.is_set()

    def hang(self) -> None:
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    async def once_resumed(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        await self._resumed.wait()
        return await question()

    async def get(self, key: str) -> bytes | None:
        self._check()
        if self._ends_at.get(key, inf) <= self.now():
            self._delete(key)
        value: bytes | None = self.data.get(key)
        return value

    async def hash_get(self, key: str) -> Mapping[bytes, bytes]:
        self._check()
        return dict(self.data.get(key, {}))

    async def sorted_set_head(self, key: str, count: int) -> Sequence[bytes]:
        self._check()
        return self._by_score(key)[:count]

    async def sorted_set_size(self, key: str) -> int:
        self._check()
        return len(self.data.get(key, {}))

    async def write(self, commands: Sequence[Command]) -> None:
        self._check()
        self.num_writes += 1
        self.apply(commands)

    def apply(self, commands: Sequence[Command]) -> None:
        for name, *arguments in commands:
            handler = self._commands.get(str(name).upper())
            if handler is None:
                raise ValueError(f"the simulated store does not know {name!r}")
            handler(*arguments)

    async def evaluate(
        self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int | float]
    ) -> Any:
        self._check()
        return SCRIPTS[script](self, keys, arguments)

    def load(self) -> StoreLoad:
        return StoreLoad()

    async def close(self) -> None:
        pass

    def now(self) -> float:
        """Returns Redis's time, which is the loop's clock."""
        return asyncio.get_running_loop().time()

    def _check(self) -> None:
        if self.is_away:
            raise StoreUnavailable("Redis is unavailable")

    def _by_score(self, key: str) -> list[bytes]:
        scores: dict[bytes, float] = self.data.get(key, {})
        return sorted(scores, key=lambda member: (scores[member], member))

    def _set(self, key: str, value: str | bytes | int, *options: str | int) -> None:
        self.data[key] = _encoded(value)
        self.time_to_live_s.pop(key, None)
        self._ends_at.pop(key, None)
        if options:
            unit, amount = options
            if unit != "EX":
                raise ValueError(f"the simulated store does not know SET … {unit}")
            self.time_to_live_s[key] = int(amount)
            self._ends_at[key] = self.now() + int(amount)

    def _set_new(self, key: str, value: str | bytes) -> None:
        self.data.setdefault(key, _encoded(value))

    def _delete(self, *keys: str) -> None:
        for key in keys:
            self.data.pop(key, None)
            self.time_to_live_s.pop(key, None)
            self._ends_at.pop(key, None)

    def _expire(self, key: str, seconds: int) -> None:
        if key in self.data:
            self.time_to_live_s[key] = seconds

    def _increase(self, key: str, amount: int) -> None:
        self.data[key] = _encoded(int(self.data.get(key, b"0")) + amount)

    def _hash_set(self, key: str, *pairs: str | bytes | int | float) -> None:
        fields = self.data.setdefault(key, {})
        for field, value in zip(pairs[::2], pairs[1::2], strict=True):
            fields[_encoded(field)] = _encoded(value)

    def _hash_set_new(self, key: str, field: str, value: str | bytes) -> None:
        self.data.setdefault(key, {}).setdefault(_encoded(field), _encoded(value))

    def _hash_increase(self, key: str, field: str, amount: int) -> None:
        fields = self.data.setdefault(key, {})
        name = _encoded(field)
        fields[name] = _encoded(int(fields.get(name, b"0")) + amount)

    def _hash_delete(self, key: str, *names: str) -> None:
        for name in names:
            self.data.get(key, {}).pop(_encoded(name), None)

    def _sorted_add(self, key: str, *pairs: str | bytes | int | float) -> None:
        members = self.data.setdefault(key, {})
        is_never_lower = pairs[0] == "GT"
        rest = pairs[is_never_lower:]
        for score, name in zip(rest[::2], rest[1::2], strict=True):
            member = _encoded(name)
            lowest = members.get(member, float(score)) if is_never_lower else float(score)
            members[member] = max(float(score), lowest)

    def _stream_add(self, key: str, *arguments: str | bytes | int | float) -> None:
        """Appends the fields after the id `*`."""
        fields = arguments[arguments.index("*") + 1 :]
        entry = {_encoded(a): _encoded(b) for a, b in zip(fields[::2], fields[1::2], strict=True)}
        self.data.setdefault(key, []).append(entry)

    def _sorted_remove(self, key: str, *members: str | bytes) -> None:
        for member in members:
            self.data.get(key, {}).pop(_encoded(member), None)

    def _sorted_remove_range(self, key: str, lowest: str, highest: float) -> None:
        if lowest != "-inf":
            raise ValueError(f"the simulated store does not know ZREMRANGEBYSCORE … {lowest}")
        scores = self.data.get(key, {})
        for member in [each for each, score in scores.items() if score <= highest]:
            del scores[member]


class ProcessStore:
    """One process's connection to the shared Redis, with the real one's timeout and breaker."""

    def __init__(self, shared: MemoryStore, process: SimulatedProcess) -> None:
        self._shared = shared
        self._process = process
        self._clock = ProcessClock(process)
        self._closed_until = 0.0
        self._is_away = False

    async def get(self, key: str) -> bytes | None:
        return await self._ask(lambda: self._shared.get(key))

    async def hash_get(self, key: str) -> Mapping[bytes, bytes]:
        return await self._ask(lambda: self._shared.hash_get(key))

    async def sorted_set_head(self, key: str, count: int) -> Sequence[bytes]:
        return await self._ask(lambda: self._shared.sorted_set_head(key, count))

    async def sorted_set_size(self, key: str) -> int:
        return await self._ask(lambda: self._shared.sorted_set_size(key))

    async def write(self, commands: Sequence[Command]) -> None:
        await self._ask(lambda: self._shared.write(commands))

    async def evaluate(
        self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int | float]
    ) -> Any:
        return await self._ask(lambda: self._shared.evaluate(script, keys, arguments))

    def load(self) -> StoreLoad:
        return StoreLoad()

    async def close(self) -> None:
        pass

    async def _ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._clock.now() < self._closed_until:
            raise StoreUnavailable("Redis is unavailable")
        try:
            await self._clock.sleep(LATENCY_S)
            is_hanging = self._shared.is_hanging
            reply = await (self._in_time(question) if is_hanging else question())
        except StoreRejected:
            self._is_away = False
            raise
        except StoreUnavailable:
            self._closed_until = self._clock.now() + BREAKER_S
            self._is_away = True
            raise
        self._is_away = False
        return reply

    async def _in_time(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a command with a timeout. A command stays in the socket of a hanging Redis after its
        caller gives up.
        """
        loop = asyncio.get_running_loop()
        served = loop.create_task(self._shared.once_resumed(question), context=Context())
        over: asyncio.Future[None] = loop.create_future()
        served.add_done_callback(lambda _: self._process.arrive(_settle, over))
        wait_s = STORE_TIMEOUT_S if self._is_away else MAX_STORE_TIMEOUT_S
        timer = self._process.call_later(wait_s, partial(_settle, over))
        try:
            await over
        finally:
            timer.cancel()
        if not served.done():
            raise StoreUnavailable("Redis does not answer")
        return served.result()


def _settle(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
