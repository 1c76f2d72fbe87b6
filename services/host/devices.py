"""The devices of this machine and their budgets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

from services.host.budget import size_text
from services.local.gpus import count_gpus, gpu_memories
from shared.config import device_budgets
from shared.errors import ConfigError
from shared.sizes import bytes_of

CPU_SHARE, CUDA_SHARE, OFFLOAD_SHARE = 0.5, 0.9, 0.5
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def budgets_of(texts: Iterable[str]) -> dict[str, int]:
    """Returns the memory budget in bytes by device; defaults apply if no text is given.

    It takes seconds with CUDA devices. Raises ConfigError for a device that this machine lacks, or
    for more than its memory.
    """
    given = device_budgets(texts)
    if not given:
        on_cuda = {device: default for device, (default, _) in _cuda_memories().items()}
        return on_cuda or {"cpu": _cpu_budget()}
    cuda = [device for device in given if device != "cpu"]
    _check_cuda(cuda)
    are_sizes = all(isinstance(given[device], int) for device in cuda)
    memories = {"cpu": (_cpu_budget(), memory_bytes()), **({} if are_sizes else _cuda_memories())}
    budgets = {device: _budget(device, each, memories) for device, each in given.items()}
    total = memory_bytes()
    if budgets.get("cpu", 0) > total:
        raise ConfigError(
            f"budget cpu={budgets['cpu']}: this machine has {size_text(total)} of memory"
        )
    return budgets


def _budget(
    device: str, given: int | Fraction | None, memories: Mapping[str, tuple[int, int]]
) -> int:
    """`memories`: the default budget, and all bytes, of devices where they are asked for."""
    if isinstance(given, int):
        return given
    default, total = memories[device]
    return default if given is None else bytes_of(given, total)


def offload_bytes_of(given: int | None, budgets: Mapping[str, int]) -> int:
    """Returns the memory of this host for weights of parked models on CUDA devices: by default half
    of it, with the budget of the CPU. Raises ConfigError for more than it has.
    """
    total, cpu_bytes = memory_bytes(), budgets.get("cpu", 0)
    if not budgets.keys() - {"cpu"}:
        return 0
    if given is None:
        return max(0, int(OFFLOAD_SHARE * total) - cpu_bytes)
    if given + cpu_bytes > total:
        raise ConfigError(
            f"parked_weights_bytes {given} with the CPU's budget of {cpu_bytes}: this machine has "
            f"{size_text(total)} of memory"
        )
    return given


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def weight_item_bytes(device: str) -> int:
    """Returns the bytes of a weight and of a KV value, where the checkpoint leaves the type to the
    device.
    """
    if device != "cpu":
        return 2
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return 4
    return 2 if words & _BF16_FLAGS else 4


def _cpu_budget() -> int:
    return int(CPU_SHARE * memory_bytes())


def _cuda_memories() -> dict[str, tuple[int, int]]:
    """Returns the default budget of each device, and its bytes in all."""
    found = enumerate(gpu_memories())
    return {f"cuda:{index}": (int(CUDA_SHARE * free), total) for index, (free, total) in found}


def _check_cuda(devices: list[str]) -> None:
    if not devices:
        return
    count = count_gpus()
    for device in devices:
        if int(device.partition(":")[2]) >= count:
            there = f"0 to {count - 1}" if count else "none"
            raise ConfigError(f"budget of {device}: the CUDA devices of this machine are {there}")
