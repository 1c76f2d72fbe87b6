"""Copies and checksums of frames, on the event loop in short chunks, or on a thread for a device.

On two cores a thread made the push slower by half, because it moves the bytes to the other core's
cache. To copy and sum 256 KiB takes about 15 µs, and other tasks run every 60 µs; to sum the
largest frame takes 0.12 ms. A memoryview copies under the GIL, which costs less than releasing it
for so short a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar, TypeVarTuple

import xxhash

from shared.background import start_awaited
from shared.kv_wire.link import MAX_FRAME_BYTES

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CHUNK_BYTES = 256 * 1024
TURN_BYTES = 4 * CHUNK_BYTES
_ZEROS = memoryview(bytes(CHUNK_BYTES))


def checksum_of(payload: memoryview) -> int:
    """Returns the xxh3-64 of the payload, in one pass because the slot was just
    filled and is cached.
    """
    return xxhash.xxh3_64_intdigest(payload)


def zero(memory: memoryview) -> None:
    """Overwrites bytes with zeros."""
    for start in range(0, len(memory), CHUNK_BYTES):
        part = memory[start : start + CHUNK_BYTES]
        part[:] = _ZEROS[: len(part)]


async def copy_and_checksum(destination: memoryview, source: memoryview) -> int:
    """Copies and returns the xxh3-64 of the copy, in chunks that are summed while still cached.

    Only the copy is summed: the writer could change the source between two reads.
    """
    hasher = xxhash.xxh3_64()
    for start in range(0, len(destination), CHUNK_BYTES):
        if start > 0 and start % TURN_BYTES == 0:
            await asyncio.sleep(0)
        chunk = destination[start : start + CHUNK_BYTES]
        chunk[:] = source[start : start + CHUNK_BYTES]
        hasher.update(chunk)
    return hasher.intdigest()


def copy_and_sum(
    destination: memoryview, source: memoryview, copy: Callable[[memoryview, memoryview], None]
) -> int:
    """Does the same on the calling thread, if a device and no core reads the copy next. `copy` and
    the hasher release the interpreter lock.
    """
    hasher = xxhash.xxh3_64()
    for start in range(0, len(destination), TURN_BYTES):
        part = destination[start : start + TURN_BYTES]
        copy(part, source[start : start + TURN_BYTES])
        hasher.update(part)
    return hasher.intdigest()


def grown(buffer: memoryview, num_bytes: int) -> memoryview:
    """Returns the buffer if it has `num_bytes`, else a new one of the next power of two."""
    if len(buffer) >= num_bytes:
        return buffer
    return memoryview(bytearray(1 << (num_bytes - 1).bit_length()))


def is_large(payload: memoryview) -> bool:
    """Whether a payload is larger than any that no device copies."""
    return len(payload) > MAX_FRAME_BYTES


async def apart_if_large(payload: memoryview, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Calls a function that passes over the payload and releases the interpreter lock: on a thread
    if the payload is large.
    """
    if is_large(payload):
        return await to_the_end(asyncio.to_thread(function, *arguments))
    return function(*arguments)


async def to_the_end(work: Awaitable[T]) -> T:
    """Awaits work that accesses our memory: a cancelled caller returns only once it has ended."""
    task = start_awaited(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise
