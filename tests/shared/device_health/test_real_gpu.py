"""NVML of the machine, where it has a GPU: the device that CUDA means is found, and can be read."""

from __future__ import annotations

import pytest
import torch

from shared.device_health.nvml_device import NvmlDevice
from shared.engine.executors.cuda.cuda_device import cuda_device

HAS_NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@HAS_NO_CUDA
def test_gpu_of_cuda_is_read() -> None:
    pynvml = pytest.importorskip("pynvml")
    device = cuda_device(torch.device("cuda", torch.cuda.device_count() - 1))
    found = NvmlDevice(device.uuid, pynvml)
    assert found.read().num_ecc_errors >= 0
    assert not found.has_events or found.next_xid(0.01) is None
    _, total = torch.cuda.mem_get_info(device.index)
    handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
    assert (
        abs(pynvml.nvmlDeviceGetMemoryInfo(handle).total - total) < 2 << 30
    )  # NVML counts what the driver takes
