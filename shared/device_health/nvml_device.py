"""One GPU, as NVIDIA's management library sees it.

Calls may block for long while a device is sick: none belongs on an event loop. `nvml` is the module
`pynvml` of the package `nvidia-ml-py`, or a fake of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# Reasons of NVML for lower clocks that say something is wrong, and their names here. A power limit
# that software sets is normal under load.
THROTTLES = {
    "nvmlClocksEventReasonSwThermalSlowdown": "thermal",
    "nvmlClocksEventReasonHwThermalSlowdown": "hw_thermal",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power_brake",
    "nvmlClocksEventReasonHwSlowdown": "hw_slowdown",
}


class HealthUnavailable(Exception):
    """NVML cannot be used for the device. The text says why."""


class GpuLost(Exception):
    """NVML says that the device is gone, or computes nothing before a reset."""


class HealthReading(NamedTuple):
    """The state of a device now. `num_ecc_errors` are uncorrected ones since its last reset."""

    num_ecc_errors: int = 0
    throttles: tuple[str, ...] = ()
    row_remap: str = ""  # pending: at the next reset; failed: the device has to be replaced


def load_nvml() -> Any:
    """Returns the module. Raises HealthUnavailable."""
    try:
        import pynvml  # not installed on machines without a GPU, if they leave it out
    except ImportError:
        raise HealthUnavailable("nvidia-ml-py is not installed") from None
    return pynvml


def nvml_problem(nvml: Any) -> str:
    """Returns why NVML cannot be used on this machine, or ""."""
    try:
        nvml.nvmlInit()
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return f"NVML: {error}"
    return ""


class NvmlDevice:
    """The device with a UUID, such as `GPU-8a2c…`. Construct it on the thread that reads it."""

    def __init__(self, uuid: str, nvml: Any) -> None:
        """Raises HealthUnavailable without NVML, without a right to it, and for a part of a GPU."""
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            if self._supported(lambda: nvml.nvmlDeviceGetMigMode(self._handle)[0], 0):
                raise HealthUnavailable("the GPU is divided (MIG): its errors may be of others")
            self._events = self._supported(self._registered, None)
        except nvml.NVMLError as error:
            raise HealthUnavailable(f"NVML: {error}") from None

    @property
    def has_events(self) -> bool:
        """Whether `next_xid` waits for events; without them no Xid is seen."""
        return self._events is not None

    def next_xid(self, timeout_s: float) -> int | None:
        """Waits for the next Xid. Returns None after the time, or earlier after another event.
        Raises GpuLost, or the library's error.
        """
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, round(timeout_s * 1e3))
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            raise self._lost_or(error) from None
        is_xid = event.eventType == nvml.nvmlEventTypeXidCriticalError
        return int(event.eventData) if is_xid else None

    def read(self) -> HealthReading:
        """Raises GpuLost, or the library's error."""
        try:
            return HealthReading(self._num_ecc_errors(), self._throttles(), self._row_remap())
        except self._nvml.NVMLError as error:
            raise self._lost_or(error) from None

    def _registered(self) -> Any | None:
        """Returns the set of events of the device, or None if it has none."""
        nvml, handle = self._nvml, self._handle
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        found = wanted & self._supported(lambda: nvml.nvmlDeviceGetSupportedEventTypes(handle), 0)
        if not found & nvml.nvmlEventTypeXidCriticalError:
            return None
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, found, events)
        return events

    def _num_ecc_errors(self) -> int:
        nvml = self._nvml
        kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return self._supported(lambda: nvml.nvmlDeviceGetTotalEccErrors(self._handle, *kind), 0)

    def _throttles(self) -> tuple[str, ...]:
        nvml = self._nvml
        mask = self._supported(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle), 0)
        return tuple(text for name, text in THROTTLES.items() if mask & getattr(nvml, name))

    def _row_remap(self) -> str:
        nvml = self._nvml
        *_, is_pending, has_failed = self._supported(
            lambda: nvml.nvmlDeviceGetRemappedRows(self._handle), (0, 0, 0, 0)
        )
        return "failed" if has_failed else "pending" if is_pending else ""

    def _supported(self, call: Callable[[], T], absent: T) -> T:
        """Returns `absent` if this device, its driver or this process has no such value."""
        nvml = self._nvml
        try:
            return call()
        except nvml.NVMLError as error:
            if error.value in (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_NO_PERMISSION,
            ):
                return absent
            raise

    def _lost_or(self, error: Exception) -> Exception:
        nvml = self._nvml
        is_lost = error.value in (  # type: ignore[attr-defined]
            nvml.NVML_ERROR_GPU_IS_LOST,
            nvml.NVML_ERROR_RESET_REQUIRED,
        )
        return GpuLost(f"NVML: {error}") if is_lost else error
