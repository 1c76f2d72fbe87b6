"""Frames and recording sinks for the tests of the KV data plane."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path

from shared.kv_wire.link import Fill, FrameHeader
from tests.support.records import frame_header
from tests.support.waiting import LIMIT_S, until

DEADLINE_S = LIMIT_S
INSTANCE = b"instance-of-test"


def header(
    payload_bytes: int, *, placement_id: bytes = b"placement-a", sequence_number: int = 0
) -> FrameHeader:
    return frame_header(payload_bytes, placement_id=placement_id, sequence_number=sequence_number)


def payload_of(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def fill_with(data: bytes) -> Fill:
    async def fill(view: memoryview) -> None:
        assert len(view) == len(data)
        view[:] = data

    return fill


class RecordingSink:
    """Records all calls. `gate` delays deliveries; `rejection` is raised to reject them."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.frames: list[tuple[FrameHeader, bytes]] = []
        self.corrupted: list[FrameHeader] = []
        self.num_lost = self.num_outside = 0
        self.rejection: Exception | None = None
        self.gate = gate
        self.entered = asyncio.Event()
        self.lost = asyncio.Event()

    async def frame(self, header: FrameHeader, payload: memoryview) -> None:
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.rejection is not None:
            raise self.rejection
        self.frames.append((header, bytes(payload)))

    def corrupt(self, header: FrameHeader) -> None:
        self.corrupted.append(header)

    def outside(self) -> None:
        self.num_outside += 1

    def link_lost(self) -> None:
        self.num_lost += 1
        self.lost.set()

    @property
    def sequence_numbers(self) -> list[int]:
        return [header.sequence_number for header, _ in self.frames]


async def eventually(is_true: Callable[[], bool]) -> None:
    """Runs the loop until the condition is true. Raises TimeoutError after DEADLINE_S."""
    await until(lambda: is_true(), poll_s=0)


def descriptors() -> dict[str, str]:
    """Targets of this process's open file descriptors, by path in /proc."""
    found = {}
    for fd in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed
            found[str(fd)] = str(fd.readlink())
    return found


def open_files() -> list[str]:
    return sorted(descriptors().values())


def path_of_descriptor(part_of_name: str) -> str:
    return next(path for path, name in descriptors().items() if part_of_name in name)
