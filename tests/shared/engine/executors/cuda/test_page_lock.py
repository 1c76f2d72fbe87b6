"""Page locks of a CUDA device, with a fake CUDA."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from structlog.testing import capture_logs

from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.engine.executors.cuda.page_lock import CudaPageLock
from tests.shared.engine.executors.cuda.fake_device import INDEX, FakeDriver


class FakeRuntime:
    """A fake `torch.cuda.cudart()`; `error` is what it returns."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[int, ...]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append((address, num_bytes, flags))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append((address,))
        return self.error


def without_cuda() -> FakeRuntime:
    raise AssertionError("Torch not compiled with CUDA enabled")


def device(driver: FakeDriver) -> CudaDevice:
    return CudaDevice(INDEX, torch.device("cpu"), driver)


def test_memory_is_registered_on_the_bound_device_and_unregistered() -> None:
    driver, runtime = FakeDriver(), FakeRuntime()
    memory = mmap.mmap(-1, 8192)
    page_lock = CudaPageLock(device(driver), lambda: runtime)
    unlock = page_lock.lock(memoryview(memory))
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert runtime.calls == [(address, 8192, 0)]
    assert driver.current_device() == INDEX
    assert unlock is not None
    with ThreadPoolExecutor(1, "other") as other:
        other.submit(unlock).result()
    assert driver.bound["other_0"] == INDEX
    target = memoryview(bytearray(8192))
    memory[:] = bytes(range(256)) * 32
    page_lock.copy(target, memoryview(memory))
    assert target == memory[:]
    assert runtime.calls[1:] == [(address,)]
    memory.close()  # no view is left


def test_unlock_leaves_no_error_to_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that CUDA keeps for a thread, nor that of a device which is lost."""
    driver, runtime, kept = FakeDriver(), FakeRuntime(), [713]
    unlock = CudaPageLock(device(driver), lambda: runtime).lock(memoryview(mmap.mmap(-1, 4096)))
    assert unlock is not None
    runtime.error = 713
    monkeypatch.setattr(torch, "ones", lambda *_, **__: kept.pop())
    unlock()
    assert not kept

    def lost(index: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(driver, "set_device", lost)
    unlock()


@pytest.mark.parametrize("runtime", [lambda: FakeRuntime(error=2), without_cuda])
def test_failure_is_logged_once(runtime) -> None:  # type: ignore[no-untyped-def]
    page_lock = CudaPageLock(device(FakeDriver()), runtime)
    with capture_logs() as logged:
        for _ in range(3):
            memory = mmap.mmap(-1, 4096)
            assert page_lock.lock(memoryview(memory)) is None
            memory.close()
    assert [each["event"] for each in logged] == ["page_lock_failed"]


def test_next_launch_does_not_raise_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps an error for the thread's next launch."""
    runtime, kept = FakeRuntime(error=2), list[int]()
    page_lock = CudaPageLock(device(FakeDriver()), lambda: runtime)

    def launch(*_: object, **__: object) -> None:
        if kept:
            raise RuntimeError(f"CUDA error: {kept.pop()}")

    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *_: kept.append(2) or 2)
    monkeypatch.setattr(torch, "ones", launch)
    assert page_lock.lock(memoryview(mmap.mmap(-1, 4096))) is None
    launch()
