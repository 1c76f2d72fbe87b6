"""Recordings of a worker's steps for operators: one at a time, in parts, not for long."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.cli.fleet.find_worker import heard_worker
from services.cli.profile.step_profile import REQUEST_TIMEOUT_S, RecordingWorker, write_trace
from services.worker.step_profiles import HEADER_BYTES, KEEP_S, StepProfiles
from shared.engine.executors.executor import RecordedSteps
from shared.errors import (
    ConfigError,
    DependencyUnavailable,
    HearthError,
    InvalidRequest,
    WorkerBusy,
)
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.messages import Heartbeat, ProfilePart, ProfileSteps, ReadProfile, StartProgress
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
    try:
        yield Operator(network.bus("operator-1"))
    finally:
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
    ("error", "text", "logged"),
    [
        (InvalidRequest("no torch"), "no torch", "profile_refused"),
        (RuntimeError("CUPTI"), "the profiler failed: CUPTI", "profile_failed"),
    ],
)
def test_failed_recording_is_the_operators_alone(error: Exception, text: str, logged: str) -> None:
    async def main() -> None:
        async with recording(error) as operator:
            begun = await operator.ask(COMMAND)
            await asyncio.sleep(COMMAND.timeout_s)
            with pytest.raises(HearthError, match=text):
                await operator.ask(ReadProfile(number=begun.number))
            assert (await operator.ask(COMMAND)).number > begun.number

    with capture_logs() as lines:
        run(main())
    assert lines[1]["event"] == logged
    assert ("exc_info" in lines[1]) == (logged == "profile_failed")


def test_operator_waits_for_a_late_worker_and_not_for_one_that_ended() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        bus = network.bus("operator-1")
        worker = RecordingWorker(bus, "decode-1", profile("decode", "decode-1"))
        with pytest.raises(DependencyUnavailable, match=r"^decode-1 has ended, or its release"):
            await worker.complete(1)
        num_asked = 0

        async def answer(command: ProfileSteps | ReadProfile) -> ProfilePart:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                await asyncio.sleep(2 * REQUEST_TIMEOUT_S)
            return ProfilePart(number=1, num_steps=1, num_bytes=2, data=b"ab")

        served = network.bus("decode-1")
        await served.serve(worker.subject, ProfileSteps | ReadProfile, answer)
        part = await worker.complete(1)
        assert num_asked == 2
        assert await worker.read(part) == b"ab"

    run(main())


def test_no_part_of_a_trace_stays_on_a_full_disk(tmp_path: Path) -> None:
    out = tmp_path / "trace.json.gz"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"^--out .*: File too large$"):
            write_trace(out, TRACE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not out.exists()


def test_trace_on_standard_output(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    write_trace(Path("-"), TRACE)
    assert capsysbinary.readouterr().out == TRACE


def test_worker_that_starts_is_named_so() -> None:
    heartbeat = Heartbeat(
        process_id="decode-1",
        epoch=1,
        sequence_number=1,
        roles=("decode",),
        state="starting",
        interval_s=HEARTBEAT_INTERVAL_S,
        starting=StartProgress(phase="compiling"),
    )
    with pytest.raises(DependencyUnavailable, match=r"^decode-1 is still starting"):
        heard_worker("decode-1", {"decode-1": heartbeat})
