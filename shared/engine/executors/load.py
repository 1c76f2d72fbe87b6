"""Chooses the device, and with it the executor, once per process.

Importing this module, or loading on CUDA, imports neither numba nor the CPU kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shared.config import default_block_size, gpu_memory_problems
from shared.engine.executors.loading.load_options import LoadOptions, OnPhase, ignore_phase
from shared.engine.executors.loading.mode_choice import resolve_mode
from shared.engine.executors.local_executor import LocalExecutor
from shared.errors import ConfigError
from shared.numerics import ModeChoice
from shared.telemetry.stage_times import StageTimes


def device_type(name: str) -> str:
    """Returns "cpu" or "cuda". Does not use the device: a process that does ends with it."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name.partition(":")[0]


def resolve_device(name: str) -> torch.device:
    """Returns the device of a name. 'auto' is CUDA if a device is present, else the CPU. Raises
    ConfigError for a missing device, or one that is neither.
    """
    name = device_type(name) if name == "auto" else name
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # the latter: a torch built without CUDA
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {name!r} cannot be used: {reason}", param="device") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device {name!r} cannot be used: it is neither the CPU nor CUDA", param="device"
        )
    return device


def refuse_gpu_memory(on_cpu: LoadOptions) -> None:
    """Raises ConfigError for a limit of a GPU's memory: the device auto may be the CPU."""
    if problems := [*gpu_memory_problems(on_cpu.gpu_memory, "cpu")]:
        raise ConfigError("; ".join(problems), param="gpu_memory")


def load_executor(
    model_dir: Path | str,
    device: str = "cpu",
    *,
    mode: ModeChoice = "exact",
    on_phase: OnPhase = ignore_phase,
    **options: Any,
) -> LocalExecutor:
    """Loads the model. `options` are the other fields of `LoadOptions`; blocks have the device's
    size if none is given. `on_phase` is called with what
    takes the time. Raises CheckpointError for a bad checkpoint, ConfigError for a bad
    option.
    """
    times = StageTimes()
    with times.stage("context"):  # CUDA's, of which the first use of the device makes one
        model_dir, target = Path(model_dir), resolve_device(device)
        if options.get("block_size") is None:
            options["block_size"] = default_block_size(target.type)
        chosen = LoadOptions(mode=resolve_mode(mode, target), **options)
    if target.type == "cuda":
        with times.stage("imports"):
            from shared.engine.executors.cuda.cuda_device import cuda_device
            from shared.engine.executors.cuda.cuda_executor import CudaExecutor

        return CudaExecutor.load(model_dir, chosen, cuda_device(target), on_phase, times)
    refuse_gpu_memory(chosen)
    from shared.engine.executors.cpu_executor import CpuExecutor  # numba

    return CpuExecutor.load(model_dir, chosen, on_phase)
