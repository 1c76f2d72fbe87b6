"""The weights of a model, on its device or, while its worker is parked, in memory of the host.

    on the device ──offload──▶ in the host's memory          the first one copies, and locks pages
          ▲  ▲                          │
          │  └──────────restore─────────┤
          └── no memory of the host     └─ no memory of the device: stays there

Weights do not change, so their copy stays: later offloads only free memory of the device. Its
addresses differ after a restore; what holds some, as graphs do, must be made anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import structlog
import torch
from torch import Tensor, nn

from shared.clock import MonotonicClock
from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.engine.executors.cuda.offload.host_memory import HostMemory, Lock
from shared.engine.executors.cuda.offload.storages import bytes_of, storages_of
from shared.lifecycle.available_memory import available_bytes
from shared.telemetry.stage_times import StageTimes

log = structlog.get_logger(__name__)

SPARE_BYTES = 1 << 30  # of the host's memory, which stay available


class WeightOffload:
    def __init__(
        self, model: nn.Module, changing: Sequence[Tensor], device: CudaDevice, lock: Lock
    ) -> None:
        """`changing` are tensors that steps write: they stay on the device."""
        self._model, self._changing = model, changing
        self._device, self._lock = device, lock
        self._clock = MonotonicClock()
        self._storages: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []
        self._host: HostMemory | None = None
        self.is_offloaded = False
        self.stages: Mapping[str, float] = {}  # NAME_s: seconds, of the last copy

    @property
    def offloaded_bytes(self) -> int:
        """The bytes that are not on the device."""
        return sum(self._sizes) if self.is_offloaded else 0

    def offload(self) -> None:
        """Gives the device's memory back to torch, unless the host has too little."""
        if self.is_offloaded:
            return
        self.stages = {}
        if self._host is not None or self._copy_to_host():
            self._free()

    def restore(self) -> None:
        """Raises torch.OutOfMemoryError without enough memory of the device. The weights are
        offloaded as before after any error.
        """
        if not self.is_offloaded:
            return
        times = StageTimes()
        try:
            with times.stage("allocate"):
                for storage, size in zip(self._storages, self._sizes, strict=True):
                    storage.resize_(size)
            with times.stage("copy"):
                for on_device, on_host in self._copies():
                    on_device.copy_(on_host, non_blocking=True)
                self._device.driver.synchronize()
        except BaseException:
            self._free()
            raise
        self.is_offloaded = False
        self.stages = times.fields()
        log.info("weights_restored", num_bytes=sum(self._sizes), **self.stages)

    def close(self) -> None:
        """Ends the use of the host's memory. Offloaded weights are lost."""
        if self._host is not None:
            self._host.close()
            self._host = None

    def _free(self) -> None:
        for storage in self._storages:
            storage.resize_(0)
        self.is_offloaded = True

    def _copy_to_host(self) -> bool:
        """Returns False, with a log line, if the host has too little memory, or if there is nothing
        to copy.
        """
        self._storages = storages_of(self._model, self._changing)
        self._sizes = [each.nbytes() for each in self._storages]
        total, available = sum(self._sizes), available_bytes()
        if not total:
            return False
        if available is not None and available < total + SPARE_BYTES:
            log.warning("weights_stay_on_device", num_bytes=total, available_bytes=available)
            return False
        times = StageTimes()
        try:
            with times.stage("lock"):
                self._host = HostMemory(total, self._lock)
        except OSError as error:
            log.warning("weights_stay_on_device", num_bytes=total, error=error.strerror)
            return False
        try:
            with times.stage("copy"):
                for on_device, on_host in self._copies():
                    on_host.copy_(on_device, non_blocking=True)
                self._device.driver.synchronize()
        except BaseException:
            self.close()
            raise
        locked, self.stages = self._host.is_locked, times.fields()
        log.info("weights_copied", num_bytes=total, is_page_locked=locked, **self.stages)
        return True

    def _copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Returns the bytes of each copy: on the device, and in one piece of the host's memory."""
        assert self._host is not None
        pieces = iter(self._host.pieces)
        room = next(pieces, torch.empty(0))
        for storage in self._storages:
            left = bytes_of(storage)
            while len(left):
                room = room if len(room) else next(pieces)
                size = min(len(left), len(room))
                yield left[:size], room[:size]
                left, room = left[size:], room[size:]
