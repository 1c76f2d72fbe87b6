# ruff: noqa: N802, N803, N815
"""A fake of the library `pynvml`: one GPU, whose state a test sets."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

UUID = "GPU-8a2c0000-0000-0000-0000-000000000001"
WAIT_S = 0.01


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


class FakeNvml:
    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_ERROR_UNKNOWN = 999
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeDoubleBitEccError = 0x2
    nvmlEventTypeXidCriticalError = 0x8
    nvmlClocksEventReasonHwSlowdown = 0x8
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self) -> None:
        self.num_ecc_errors = 0
        self.clocks = 0
        self.remapped = (0, 0, 0, 0)
        self.mig_mode = 0
        self.event_types = 0xFF
        self.errors: dict[str, int] = {}  # code by function
        self.answers = threading.Event()  # cleared: reads hang
        self.answers.set()
        self.num_reads = 0
        self._events: queue.Queue[tuple[int, int]] = queue.Queue()

    def xid(self, code: int) -> None:
        self._events.put((self.nvmlEventTypeXidCriticalError, code))

    def double_bit_error(self) -> None:
        self.num_ecc_errors += 1
        self._events.put((self.nvmlEventTypeDoubleBitEccError, 0))

    def nvmlInit(self) -> None:
        self._answer("nvmlInit")

    def nvmlShutdown(self) -> None:
        self._answer("nvmlShutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._answer("nvmlDeviceGetHandleByUUID")
        if uuid != UUID:
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        return "handle"

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        self._answer("nvmlDeviceGetMigMode")
        return [self.mig_mode, 0]

    def nvmlDeviceGetSupportedEventTypes(self, handle: Any) -> int:
        self._answer("nvmlDeviceGetSupportedEventTypes")
        return self.event_types

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None:
        self._answer("nvmlDeviceRegisterEvents")
        assert eventTypes & ~self.event_types == 0

    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> SimpleNamespace:
        assert isinstance(timeoutms, int)
        self._answer("nvmlEventSetWait_v2")
        try:
            kind, data = self._events.get(timeout=min(WAIT_S, timeoutms / 1e3))
        except queue.Empty:
            raise NVMLError(self.NVML_ERROR_TIMEOUT) from None
        return SimpleNamespace(eventType=kind, eventData=data)

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, errorType: int, counterType: int) -> int:
        self._answer("nvmlDeviceGetTotalEccErrors")
        self.num_reads += 1
        return self.num_ecc_errors

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        self._answer("nvmlDeviceGetCurrentClocksEventReasons")
        return self.clocks

    def nvmlDeviceGetRemappedRows(self, device: Any) -> tuple[int, int, int, int]:
        self._answer("nvmlDeviceGetRemappedRows")
        return self.remapped

    def _answer(self, function: str) -> None:
        self.answers.wait()
        if function in self.errors:
            raise NVMLError(self.errors[function])
