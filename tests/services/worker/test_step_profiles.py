"""Recordings of a worker's steps for operators: one at a time, in parts, not for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.worker.step_profiles import HEADER_BYTES, KEEP_S, StepProfiles
from shared.engine.executors.step_profile import RecordedSteps
from shared.errors import HearthError, InvalidRequest, WorkerBusy
from shared.messages import ProfilePart, ProfileSteps, ReadProfile
from shared.subjects import profile
from tests.support.world.bus import SimulatedBus, SimulatedNetwork
from tests.support.world.clock import run
from tests.support.world.kv_link import DataPlane
from tests.support.world.workers import CopyingExecutor, SimulatedWorker

PART_BYTES = 1000
TRACE = bytes(range(256)) * 10
COMMAND = ProfileSteps(num_steps=3, timeout_s=10.0)


class RecordingExecutor(CopyingExecutor):
    error: Exception | None = None

    async def profile(self, num_steps: int, timeout_s: float) -> RecordedSteps:
        await self._clock.sleep(timeout_s)
        if self.error is not None:
            raise self.error
        return RecordedSteps(num_steps, TRACE)


class Operator:
    def __init__(self, bus: SimulatedBus) -> None:
        self._bus = bus

    async def ask(self, command: ProfileSteps | ReadProfile) -> ProfilePart:
        return await self._bus.request(
            profile("decode", "decode-1"), command, ProfilePart, timeout_s=0.5
        )


@asynccontextmanager
async def recording(error: Exception | None = None) -> AsyncIterator[Operator]:
    network = SimulatedNetwork(max_payload_bytes=PART_BYTES + HEADER_BYTES)
    host = SimulatedWorker(
        network, DataPlane(), "decode-1", ("decode",), executor_type=RecordingExecutor
    )
    host.executor.error = error
    profiles = StepProfiles(host.worker)
    await profiles.start()
    yield Operator(network.bus("operator-1"))
    await profiles.stop()


def test_recording_is_read_in_parts_and_forgotten() -> None:
    async def main() -> None:
        async with recording() as operator:
            begun = await operator.ask(COMMAND)
            read = ReadProfile(number=begun.number)
            assert (await operator.ask(read)).num_bytes is None
            with pytest.raises(WorkerBusy, match="records steps for somebody else"):
                await operator.ask(COMMAND)
            await asyncio.sleep(COMMAND.timeout_s)
            trace = b""
            while True:
                part = await operator.ask(ReadProfile(number=begun.number, first_byte=len(trace)))
                assert (part.num_steps, part.num_bytes) == (3, len(TRACE))
                assert len(part.data) <= PART_BYTES
                trace += part.data
                if len(trace) == part.num_bytes:
                    break
            assert trace == TRACE
            await asyncio.sleep(KEEP_S)
            with pytest.raises(InvalidRequest, match="no longer there"):
                await operator.ask(read)

    run(main())


def test_next_recording_replaces_the_last() -> None:
    async def main() -> None:
        async with recording() as operator:
            first = await operator.ask(COMMAND)
            await asyncio.sleep(COMMAND.timeout_s + KEEP_S / 2)
            second = await operator.ask(COMMAND)
            with pytest.raises(InvalidRequest, match="no longer there"):
                await operator.ask(ReadProfile(number=first.number))
            await asyncio.sleep(KEEP_S / 2)  # the time of the first is over
            assert (await operator.ask(ReadProfile(number=second.number))).num_bytes

    run(main())


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InvalidRequest("no torch"), "no torch"),
        (RuntimeError("CUPTI"), "the profiler failed: CUPTI"),
    ],
)
def test_failed_recording_is_the_operators_alone(error: Exception, text: str) -> None:
    async def main() -> None:
        async with recording(error) as operator:
            begun = await operator.ask(COMMAND)
            await asyncio.sleep(COMMAND.timeout_s)
            with pytest.raises(HearthError, match=text):
                await operator.ask(ReadProfile(number=begun.number))
            assert (await operator.ask(COMMAND)).number > begun.number

    run(main())
