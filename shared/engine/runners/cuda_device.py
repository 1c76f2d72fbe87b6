"""One CUDA device as a runner uses it: threads are bound to it, its memory is measured.

A fresh thread starts on device 0, and Triton launches on the thread's current device: with tensors
on another one, kernels would run on the wrong GPU.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import torch

from shared.engine.runners.kv_sizing import MemoryReport


class CudaDriver(Protocol):
    """What is used of `torch.cuda`. A device is current for the calling thread alone."""

    def set_device(self, device: int, /) -> None: ...
    def current_device(self) -> int: ...
    def synchronize(self) -> None: ...
    def empty_cache(self) -> None: ...
    def mem_get_info(self, device: int, /) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """`tensors_on`: where tensors live, `torch.device("cuda", index)` but for tests."""

    index: int
    tensors_on: torch.device
    driver: CudaDriver

    def bind(self) -> None:
        """Makes it the calling thread's current device."""
        self.driver.set_device(self.index)

    def check_bound(self) -> None:
        """Raises RuntimeError if the calling thread would launch on another device."""
        current = self.driver.current_device()
        if current != self.index:
            name = threading.current_thread().name
            raise RuntimeError(
                f"thread {name!r} is on cuda:{current}, and the model is on cuda:{self.index}"
            )

    def memory(self) -> MemoryReport:
        """After all that was launched has ended."""
        self.driver.synchronize()
        free, total = self.driver.mem_get_info(self.index)
        return MemoryReport(free=free, total=total)

    def release_cached(self) -> None:
        """Gives memory that torch keeps for reuse back to the device."""
        self.driver.synchronize()
        self.driver.empty_cache()


def cuda_device(device: torch.device) -> CudaDevice:
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaDevice(index, torch.device("cuda", index), torch.cuda)
