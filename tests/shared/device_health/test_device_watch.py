"""The health of a GPU, read from a fake of NVML: what is reported, and what ends a worker."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from shared.clock import MonotonicClock
from shared.device_health import device_watch
from shared.device_health.device_watch import LATE_S, DeviceWatch
from shared.device_health.nvml_device import NvmlDevice, nvml_problem
from shared.device_health.xids import FATAL_XIDS, fatal_xid
from shared.messages import DeviceHealth
from tests.shared.device_health.fake_nvml import UUID, FakeNvml
from tests.support.waiting import until

READ = "nvmlDeviceGetTotalEccErrors"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_watch, "POLL_S", 0.01)
    monkeypatch.setattr(device_watch, "MIN_POLL_S", 0.0)


class LateClock(MonotonicClock):
    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


class Watched:
    def __init__(self, nvml: FakeNvml, uuid: str) -> None:
        self.clock = LateClock()
        self.faults: list[str] = []
        self.watch = DeviceWatch(lambda: NvmlDevice(uuid, nvml), self.clock, self.faults.append)

    @property
    def health(self) -> DeviceHealth:
        return self.watch.health() or DeviceHealth()


@asynccontextmanager
async def watching(nvml: FakeNvml, uuid: str = UUID) -> AsyncIterator[Watched]:
    """Yields the watch of a device that has been read once, if it can be."""
    watched = Watched(nvml, uuid)
    with capture_logs() as logs:
        watched.watch.start()
        await until(lambda: watched.watch.health() or logs)
    try:
        yield watched
    finally:
        watched.watch.stop()
        nvml.answers.set()


@pytest.mark.parametrize("xid", [48, 79, 94, 119])
async def test_fatal_xid_is_a_fault_once(xid: int) -> None:
    nvml = FakeNvml()
    async with watching(nvml) as it:
        nvml.xid(13)  # an application's own
        nvml.xid(63)  # a remapped row
        await until(lambda: it.health.num_xids == 2)
        assert (it.faults, it.health.last_xid) == ([], 63)
        nvml.xid(xid)
        nvml.xid(xid)
        await until(lambda: it.faults)
        await asyncio.sleep(0.05)
        assert it.faults == [f"Xid {xid}: {FATAL_XIDS[xid]}"] == [it.health.fault]


def test_application_faults_and_notices_are_not_fatal() -> None:
    assert not any(map(fatal_xid, (13, 31, 32, 43, 45, 63, 68, 69, 74, 92, 154)))


@pytest.mark.parametrize("has_event", [True, False])
async def test_ecc_error_since_the_start_is_a_fault(has_event: bool) -> None:
    nvml = FakeNvml()
    nvml.num_ecc_errors = 3  # before this process: its memory is not affected
    async with watching(nvml) as it:
        num_reads = nvml.num_reads
        await until(lambda: nvml.num_reads > num_reads + 2)
        assert it.faults == []
        if has_event:
            nvml.double_bit_error()
        else:
            nvml.num_ecc_errors += 1
        await until(lambda: it.faults == ["uncorrected ECC error"])
        assert it.health.num_ecc_errors == 1


async def test_throttling_and_remapped_rows_are_reported_and_no_fault() -> None:
    nvml = FakeNvml()
    async with watching(nvml) as it:
        nvml.clocks = 0x4 | 0x20 | 0x80  # 0x4: the usual limit of power
        await until(lambda: it.health.throttles == ("thermal", "power_brake"))
        nvml.clocks, nvml.remapped = 0x1, (0, 1, 1, 0)
        await until(lambda: it.health == DeviceHealth(row_remap="pending"))
        nvml.remapped = (0, 1, 0, 1)
        await until(lambda: it.health.row_remap == "failed")
        assert it.faults == []


@pytest.mark.parametrize("code", ["NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED"])
@pytest.mark.parametrize("function", [READ, "nvmlEventSetWait_v2"])
async def test_lost_gpu_is_a_fault(code: str, function: str) -> None:
    nvml = FakeNvml()
    async with watching(nvml) as it:
        nvml.errors[function] = getattr(nvml, code)
        await until(lambda: it.faults)
        assert it.faults == [f"NVML: code {getattr(nvml, code)}"]


@pytest.mark.parametrize("is_hanging", [True, False])
async def test_reading_that_does_not_come_is_reported_by_its_age(is_hanging: bool) -> None:
    nvml = FakeNvml()
    async with watching(nvml) as it:
        if is_hanging:
            nvml.answers.clear()
        else:
            nvml.errors[READ] = nvml.NVML_ERROR_UNKNOWN
        await asyncio.sleep(0.05)  # a reading that was under way has been taken
        it.clock.ahead_s = LATE_S + 1
        with capture_logs() as logs:
            assert it.health.unread_s > LATE_S
            assert it.health.unread_s > LATE_S
        assert [each["event"] for each in logs] == ["device_health_late"]
        nvml.errors.clear()
        nvml.answers.set()
        await until(lambda: it.health.unread_s == 0)
        assert it.faults == []


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("nvmlInit", "NVML_ERROR_LIBRARY_NOT_FOUND"),
        ("nvmlInit", "NVML_ERROR_NO_PERMISSION"),
        ("nvmlDeviceGetHandleByUUID", "NVML_ERROR_NOT_FOUND"),
    ],
)
async def test_unwatched_gpu_is_one_line(function: str, code: str) -> None:
    nvml = FakeNvml()
    nvml.errors[function] = getattr(nvml, code)
    await assert_unwatched(nvml, f"NVML: code {getattr(nvml, code)}")


async def test_part_of_a_gpu_is_not_watched() -> None:
    nvml = FakeNvml()
    nvml.mig_mode = 1
    await assert_unwatched(nvml, "the GPU is divided (MIG): its errors may be of others")


async def assert_unwatched(nvml: FakeNvml, reason: str) -> None:
    watched = Watched(nvml, UUID)
    with capture_logs() as logs:
        watched.watch.start()
        await until(lambda: logs)
    (line,) = logs
    assert (line["event"], line["reason"]) == ("device_health_unwatched", reason)
    assert (watched.watch.health(), watched.faults) == (None, [])


async def test_gpu_without_events_and_ecc_is_read() -> None:
    nvml = FakeNvml()
    nvml.event_types = nvml.nvmlEventTypeDoubleBitEccError
    for function in (READ, "nvmlDeviceGetMigMode", "nvmlDeviceGetRemappedRows"):
        nvml.errors[function] = nvml.NVML_ERROR_NOT_SUPPORTED
    async with watching(nvml) as it:
        nvml.clocks = 0x40
        await until(lambda: it.health == DeviceHealth(throttles=("hw_thermal",)))


def test_problem_of_a_machine() -> None:
    nvml = FakeNvml()
    assert nvml_problem(nvml) == ""
    nvml.errors["nvmlInit"] = nvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert nvml_problem(nvml) == "NVML: code 12"


def test_library_has_what_the_fake_has() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in (each for each in vars(FakeNvml) if each.startswith(("nvml", "NVML_"))):
        own, theirs = getattr(FakeNvml, name), getattr(pynvml, name)
        if callable(own):
            _, *parameters = inspect.signature(own).parameters
            assert parameters == list(inspect.signature(theirs).parameters), name
        else:
            assert own == theirs, name
    assert pynvml.NVMLError(15).value == FakeNvml.NVML_ERROR_GPU_IS_LOST
