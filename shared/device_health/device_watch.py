"""Watches the health of a worker's GPU on a thread of its own.

                ┌─ waits POLL_S for an Xid ◀─┐
    opens NVML ─┤                            ├─ a fault: `on_fault`, once; the thread ends
                └─▶ reads ECC, throttling ───┘

A reading that does not come, because NVML hangs or raises, is reported by its age.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

import structlog
from msgspec.structs import replace

from shared.background import item_error
from shared.clock import Clock
from shared.device_health.nvml_device import GpuLost, HealthReading, HealthUnavailable
from shared.device_health.xids import fatal_xid
from shared.messages import DeviceHealth

log = structlog.get_logger(__name__)

POLL_S = 2.0
MIN_POLL_S = 0.1  # after an Xid: an application can cause many
LATE_S = 5 * POLL_S


class WatchedDevice(Protocol):
    """See `NvmlDevice`."""

    @property
    def has_events(self) -> bool: ...
    def next_xid(self, timeout_s: float) -> int | None: ...
    def read(self) -> HealthReading: ...


class DeviceWatch:
    def __init__(
        self,
        open_device: Callable[[], WatchedDevice],
        clock: Clock,
        on_fault: Callable[[str], None],
    ) -> None:
        """`open_device` runs on the watch's thread and may raise HealthUnavailable. `on_fault` gets
        the reason on the event loop.
        """
        self._open = open_device
        self._clock = clock
        self._on_fault = on_fault
        self._health: DeviceHealth | None = None
        self._read_at = 0.0
        self._is_late = False
        self._stopping = threading.Event()

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        thread = threading.Thread(  # a daemon: NVML may hang while the process ends
            target=self._watch, args=(loop,), name="device-health", daemon=True
        )
        thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def health(self) -> DeviceHealth | None:
        """Returns what is known now; None before the first reading, and if there is none."""
        if self._health is None:
            return None
        age_s = self._clock.now() - self._read_at
        is_late = age_s > LATE_S and not self._health.fault
        if is_late != self._is_late:
            self._is_late = is_late
            log.warning("device_health_late" if is_late else "device_health_read_again")
        return replace(self._health, unread_s=age_s) if is_late else self._health

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs on the thread."""
        opened = self._opened()
        if opened is None:
            return
        device, record = opened
        is_new = True
        while not self._stopping.is_set():
            if is_new and not self._post(loop, record.health):
                return
            if record.health.fault:
                return
            is_new = self._observe(device, record)

    def _opened(self) -> tuple[WatchedDevice, HealthRecord] | None:
        try:
            device = self._open()
            record = HealthRecord(device.read())
        except (HealthUnavailable, GpuLost) as error:
            log.warning("device_health_unwatched", reason=str(error))
            return None
        except BaseException as raised:  # whatever the library raises, the worker serves
            log.warning("device_health_unwatched", reason=repr(item_error(raised)))
            return None
        if not device.has_events:
            log.warning("device_xids_unwatched", reason="NVML has no such events of this GPU")
        return device, record

    def _observe(self, device: WatchedDevice, record: HealthRecord) -> bool:
        """Waits, and reads the device. Returns whether there is a new state: an error other than a
        lost GPU is a reading that did not come.
        """
        try:
            if not device.has_events:
                self._stopping.wait(POLL_S)
            elif (xid := device.next_xid(POLL_S)) is not None:
                record.add_xid(xid)
                self._stopping.wait(0.0 if record.health.fault else MIN_POLL_S)
            record.add(device.read())
        except GpuLost as error:
            record.fail(str(error))
        except BaseException as raised:
            log.debug("device_health_unread", reason=repr(item_error(raised)))
            self._stopping.wait(POLL_S)
            return bool(record.health.fault)
        return True

    def _post(self, loop: asyncio.AbstractEventLoop, health: DeviceHealth) -> bool:
        """Hands the state to the event loop. Returns False once that is closed."""
        try:
            loop.call_soon_threadsafe(self._take, health)
        except RuntimeError:
            return False
        return True

    def _take(self, health: DeviceHealth) -> None:
        self._health, self._read_at = health, self._clock.now()
        if health.fault:
            self._on_fault(health.fault)


class HealthRecord:
    """What has happened to a device since its first reading."""

    def __init__(self, first: HealthReading) -> None:
        self._first = first
        self.health = _with_state(DeviceHealth(), first)

    def add(self, reading: HealthReading) -> None:
        num_errors = max(0, reading.num_ecc_errors - self._first.num_ecc_errors)
        if num_errors > self.health.num_ecc_errors:
            self.fail("uncorrected ECC error")
        health = replace(self.health, num_ecc_errors=max(num_errors, self.health.num_ecc_errors))
        self.health = _with_state(health, reading)

    def add_xid(self, xid: int) -> None:
        fault = fatal_xid(xid)
        if xid != self.health.last_xid:
            log.warning("device_xid", xid=xid, is_fatal=fault is not None)
        self.health = replace(self.health, num_xids=self.health.num_xids + 1, last_xid=xid)
        if fault is not None:
            self.fail(fault)

    def fail(self, reason: str) -> None:
        """The first fault is the cause."""
        self.health = replace(self.health, fault=self.health.fault or reason)


def _with_state(health: DeviceHealth, reading: HealthReading) -> DeviceHealth:
    return replace(health, throttles=reading.throttles, row_remap=reading.row_remap)
