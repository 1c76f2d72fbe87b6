import ctypes
from types import SimpleNamespace
from typing import Any

from services.local.gpus import compute_capability, count_gpus


def test_count_is_zero_without_a_driver() -> None:
    assert count_gpus("libthere_is_no_such_driver.so.1") == 0


def test_compute_capability_is_that_of_the_driver() -> None:
    def get(device: Any, index: int) -> int:
        device._obj.value = 7
        return 0 if index == 1 else 101

    def get_attribute(number: Any, attribute: int, device: ctypes.c_int) -> int:
        number._obj.value = {75: 8, 76: 9}[attribute]
        return 0 if device.value == 7 else 101

    driver = SimpleNamespace(
        cuInit=lambda flags: 0, cuDeviceGet=get, cuDeviceGetAttribute=get_attribute
    )
    assert compute_capability(1, lambda name: driver) == (8, 9)
    assert compute_capability(2, lambda name: driver) is None
    assert compute_capability(0, lambda name: ctypes.CDLL("libthere_is_no_driver.so.1")) is None
