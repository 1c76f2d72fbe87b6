"""Loads a CUDA worker's executor, with the time of each stage; a dry run has tensors on the CPU.

There the stages run, up to the last one, and only the weights stay unset.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_kit import roofline
from benchmarks.gpu_kit.session import Session
from kernels.device import TritonUnusable, check_triton
from shared.engine.executors.cuda import cuda_load
from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.local_executor import LocalExecutor

Seconds = Mapping[str, float]


def load(
    session: Session, folder: Path, mode: Any, load_format: str = "dummy"
) -> tuple[LocalExecutor, Seconds]:
    """Returns the executor, and the seconds of each stage as it tells them."""
    options: dict[str, Any] = {
        "load_format": load_format,
        "mode": mode,
        "max_batch_tokens": max(session.shapes.chunks),
        "block_size": session.shapes.block_size,
    }
    if not session.is_dry:
        executor = load_executor(folder, device="cuda", **options)
        return executor, executor.load_stages
    tokens = max(session.shapes.prompt, session.shapes.context)
    num_bytes = tokens * roofline.kv_bytes_per_token(session.shapes.config)
    chosen = LoadOptions(dtype="bfloat16", kv_cache_bytes=num_bytes, **options)
    with patch.object(cuda_load, "load_weights", lambda *_: None):
        executor = CudaExecutor.load(folder, chosen, cpu_as_cuda())
    return executor, executor.load_stages


class NoCuda:
    """The part of `torch.cuda` that an executor uses, without a device."""

    def set_device(self, device: int, /) -> None: ...
    def synchronize(self) -> None: ...
    def empty_cache(self) -> None: ...

    def current_device(self) -> int:
        return 0

    def mem_get_info(self, device: int, /) -> tuple[int, int]:
        raise RuntimeError("a dry run has no memory to measure")

    def memory_reserved(self, device: int, /) -> int:
        raise RuntimeError("a dry run has no memory to measure")

    def set_per_process_memory_fraction(self, fraction: float, device: int, /) -> None: ...

    def Stream(self, device: int, priority: int, /) -> Any:  # noqa: N802
        return None

    def Event(self) -> Any:  # noqa: N802
        return self

    def record(self) -> None: ...

    def stream(self, stream: Any, /) -> AbstractContextManager[Any]:
        raise RuntimeError("a dry run copies no KV")


def cpu_as_cuda() -> CudaDevice:
    return CudaDevice(0, torch.device("cpu"), NoCuda(), try_kernel=launch_check)


def launch_check(device: torch.device) -> None:
    """Launches the kernel by which a worker checks its device, which computes nothing here."""
    with suppress(TritonUnusable):
        check_triton(device)
