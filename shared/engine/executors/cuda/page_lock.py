"""Page-locks memory of the host for a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import structlog
import torch

from shared.engine.executors.cuda.cuda_device import CudaDevice

log = structlog.get_logger(__name__)


class CudaRuntime(Protocol):
    """The part of `torch.cuda.cudart()` used here. Both return an error code, 0 for success."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int, /) -> Any: ...  # noqa: N802
    def cudaHostUnregister(self, address: int, /) -> Any: ...  # noqa: N802


class CudaPageLock:
    """A `PageLock`. The first failure is logged; copies then go through a buffer."""

    def __init__(
        self, device: CudaDevice, runtime: Callable[[], CudaRuntime] = torch.cuda.cudart
    ) -> None:
        self._device = device
        self._runtime = runtime
        self._has_failed = False

    @property
    def device(self) -> str:
        return self._device.uuid

    def lock(self, memory: memoryview) -> Callable[[], None] | None:
        """Binds the calling thread: its first call to CUDA takes memory of the current device."""
        as_bytes = torch.frombuffer(memory, dtype=torch.uint8)
        address, num_bytes = as_bytes.data_ptr(), as_bytes.nbytes
        try:
            self._device.bind()
            runtime = self._runtime()
            if code := int(runtime.cudaHostRegister(address, num_bytes, 0)):
                self._device.forget_error()
                raise RuntimeError(f"cudaHostRegister returned {code}")
        except (AssertionError, RuntimeError) as error:  # a torch without CUDA asserts
            if not self._has_failed:
                log.warning("page_lock_failed", num_bytes=num_bytes, error=str(error))
            self._has_failed = True
            return None
        return partial(self._unlock, runtime, address)

    def copy(self, destination: memoryview, source: memoryview) -> None:
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))

    def _unlock(self, runtime: CudaRuntime, address: int) -> None:
        """Ignores errors: the device may be lost, or a process that ends has unloaded CUDA already.
        Binds the calling thread, which may be the first to call CUDA.
        """
        with suppress(RuntimeError):
            self._device.bind()
            if int(runtime.cudaHostUnregister(address)):
                self._device.forget_error()
