"""Copies and checksums of whole frames, on the event loop and in short turns.

On two cores a thread made the push slower by half: it carries the bytes to the other core's cache.
256 KiB take about 15 µs to copy and sum, so others wait 60 µs for their turn; to sum the largest
frame takes 0.12 ms. A memoryview copies under the interpreter lock, which costs less than letting
go of it for so short a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

import xxhash

T = TypeVar("T")

PIECE_BYTES = 256 * 1024
TURN_BYTES = 4 * PIECE_BYTES


def checksum_of(payload: memoryview) -> int:
    """The xxh3-64 of these bytes; in one go, because the slot just filled is still cached."""
    return xxhash.xxh3_64_intdigest(payload)


async def copy_and_checksum(destination: memoryview, source: memoryview) -> int:
    """Copies and returns the xxh3-64 of the copy, piece by piece while a piece is still cached.

    Only the copy is summed: the writer could change the source between two reads of it.
    """
    hasher = xxhash.xxh3_64()
    for start in range(0, len(destination), PIECE_BYTES):
        if start > 0 and start % TURN_BYTES == 0:
            await asyncio.sleep(0)
        piece = destination[start : start + PIECE_BYTES]
        piece[:] = source[start : start + PIECE_BYTES]
        hasher.update(piece)
    return hasher.intdigest()


def grown(buffer: memoryview, num_bytes: int) -> memoryview:
    """The buffer if it is large enough, else a new one of the next power of two."""
    if len(buffer) >= num_bytes:
        return buffer
    return memoryview(bytearray(1 << (num_bytes - 1).bit_length()))


async def to_the_end(work: Awaitable[T]) -> T:
    """Awaits work that touches memory of ours: a cancelled caller leaves only when it is over."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise
