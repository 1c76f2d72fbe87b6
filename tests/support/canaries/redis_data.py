"""All that lies in a Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redis.asyncio import Redis

_COMMANDS: dict[bytes, tuple[Any, ...]] = {
    b"string": ("GET",),
    b"hash": ("HGETALL",),
    b"set": ("SMEMBERS",),
    b"list": ("LRANGE", 0, -1),
    b"zset": ("ZRANGE", 0, -1),
    b"stream": ("XRANGE", "-", "+"),
}


async def redis_data(url: str, pattern: str = "*") -> bytes:
    """Returns all keys that match a pattern, and their values, a line each."""
    client = Redis.from_url(url)
    try:
        found = []
        async for key in client.scan_iter(pattern, count=1000):
            kind = await client.type(key)
            if kind != b"none":  # it ended meanwhile
                command, *arguments = _COMMANDS[kind]
                value = await client.execute_command(command, key, *arguments)
                found.append(b" ".join((key, *_pieces(value))))
        return b"\n".join(found)
    finally:
        await client.aclose()


def _pieces(value: Any) -> Iterator[bytes]:
    match value:
        case bytes():
            yield value
        case dict():
            for pair in value.items():
                yield from _pieces(pair)
        case list() | tuple() | set():
            for each in value:
                yield from _pieces(each)
        case _:
            yield str(value).encode()
