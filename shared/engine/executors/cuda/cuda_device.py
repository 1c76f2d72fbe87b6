"""One CUDA device of an executor: binds threads to it and measures its memory.

A new thread starts on device 0, and Triton launches on the thread's current device: with tensors on
another device, kernels would run on the wrong GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any, Protocol

import torch

from kernels.device import TritonUnusable, check_triton
from shared.engine.executors.loading.kv_sizing import MemoryReport
from shared.errors import ConfigError, OutOfMemory

# of allocations that are not torch's: CUDA's, its libraries' and Triton's
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class CudaDriver(Protocol):
    """The part of `torch.cuda` used here. The current device is a property of the thread."""

    def set_device(self, device: int, /) -> None: ...
    def current_device(self) -> int: ...
    def synchronize(self) -> None: ...
    def empty_cache(self) -> None: ...
    def get_device_properties(self, device: int, /) -> Any: ...
    def mem_get_info(self, device: int, /) -> tuple[int, int]: ...
    def memory_reserved(self, device: int, /) -> int: ...
    def set_per_process_memory_fraction(self, fraction: float, device: int, /) -> None: ...
    def Stream(self, device: int, priority: int, /) -> Any: ...  # noqa: N802
    def Event(self) -> Any: ...  # noqa: N802
    def stream(self, stream: Any, /) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA device. `tensors_on` is `torch.device("cuda", index)` except in tests. `try_kernel`
    runs a kernel there, or raises TritonUnusable.
    """

    index: int
    tensors_on: torch.device
    driver: CudaDriver
    try_kernel: Callable[[torch.device], None] = check_triton

    @property
    def uuid(self) -> str:
        """Returns the id of the GPU that CUDA calls by this index, as NVML names it."""
        return f"GPU-{self.driver.get_device_properties(self.index).uuid}"

    def bind(self) -> None:
        """Makes it the calling thread's current device."""
        self.driver.set_device(self.index)

    def check_kernels(self) -> None:
        """Raises ConfigError if a kernel cannot be compiled, loaded and run: at the start, where
        the operator notices it, not at each request.
        """
        try:
            self.try_kernel(self.tensors_on)
        except TritonUnusable as error:
            raise ConfigError(str(error), param="device") from error

    def check_bound(self) -> None:
        """Raises RuntimeError if the calling thread would launch on another device."""
        current = self.driver.current_device()
        if current != self.index:
            name = threading.current_thread().name
            raise RuntimeError(
                f"thread {name!r} is on cuda:{current}, and the model is on cuda:{self.index}"
            )

    def memory(self) -> MemoryReport:
        """Returns the memory report, after all launched work has ended."""
        self.driver.synchronize()
        free, total = self.driver.mem_get_info(self.index)
        return MemoryReport(free, total, self.driver.memory_reserved(self.index))

    def limit_torch(self, share: float) -> None:
        """Lets torch hold at most this share of the device's memory: beyond it, what allocates
        raises OutOfMemoryError, as if the device had no more.
        """
        self.driver.set_per_process_memory_fraction(share, self.index)

    def forget_error(self) -> None:
        """Clears the error that CUDA keeps of a call of this thread, not of torch's, which failed.
        Torch would raise it at its next launch, whatever that is.
        """
        with suppress(RuntimeError):
            torch.ones(1, device=self.tensors_on)

    def release_cached(self) -> None:
        """Returns what torch caches for reuse: memory of the device, pinned memory of the host."""
        self.driver.synchronize()
        self.driver.empty_cache()
        empty_pinned = getattr(torch._C, "_host_emptyCache", None)  # builds without CUDA lack it
        if self.tensors_on.type == "cuda" and empty_pinned is not None:
            empty_pinned()


def cuda_device(device: torch.device) -> CudaDevice:
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaDevice(index, torch.device("cuda", index), torch.cuda)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _OUT_OF_MEMORY)


@contextmanager
def telling_of_memory() -> Iterator[None]:
    """Raises OutOfMemory for an error of torch, whose frames release their tensors."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        clear_frames(error.__traceback__)
        raise OutOfMemory(str(error).partition("\n")[0]) from None
