"""The CUDA devices that a worker on this machine can use."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_DRIVER = "libcuda.so.1"
_QUESTION = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
_MEMORY = (
    "import torch\nif torch.cuda.is_available():\n"
    "    for each in range(torch.cuda.device_count()): print(*torch.cuda.mem_get_info(each))"
)
_TIMEOUT_S = 60.0
_CAPABILITY = 75, 76  # attributes of CUdevice_attribute: major and minor


def count_gpus(driver_name: str = _DRIVER) -> int:
    """Returns the device count of torch, with CUDA_VISIBLE_DEVICES applied; 0 without a driver.

    A child process imports torch, which takes seconds, and only if the driver has devices. The
    driver's count is not enough, as torch may be built without CUDA.
    """
    return _count_by_torch() if count_by_driver(driver_name) else 0


def compute_capability(
    index: int, load: Callable[[str], Any] = ctypes.CDLL
) -> tuple[int, int] | None:
    """Returns the capability of the device that torch calls `cuda:index`, or None if the driver
    does not say.
    """
    try:
        driver = load(_DRIVER)
    except OSError:
        return None
    device, found = ctypes.c_int(0), (ctypes.c_int(0), ctypes.c_int(0))
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    for number, attribute in zip(found, _CAPABILITY, strict=True):
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device) != 0:
            return None
    return found[0].value, found[1].value


def count_by_driver(name: str = _DRIVER) -> int:
    """Returns the devices of the driver, which torch may not be able to use; 0 without one."""
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _count_by_torch() -> int:
    try:
        return int(_answer(_QUESTION))
    except ValueError:
        return 0


def _answer(question: str) -> str:
    """Returns the output of a child process; empty if it fails."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", question],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return child.stdout


def gpu_memories() -> list[tuple[int, int]]:
    """Returns the free bytes and all bytes of each device that torch shows; empty without one."""
    if not count_by_driver(_DRIVER):
        return []
    numbers = [int(each) for each in _answer(_MEMORY).split()]
    return list(zip(numbers[::2], numbers[1::2], strict=True))
