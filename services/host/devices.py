"""The devices of this machine and their budgets."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from services.host.budget import size_text
from services.local.gpus import count_gpus, free_gpu_bytes
from shared.config import device_budgets
from shared.errors import ConfigError

CPU_SHARE, CUDA_SHARE = 0.5, 0.9
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def budgets_of(texts: Iterable[str]) -> dict[str, int]:
    """Returns the memory budget in bytes by device; defaults apply if no text is given.

    It takes seconds with CUDA devices. Raises ConfigError for a device that this machine lacks, or
    for more than its memory.
    """
    given = device_budgets(texts)
    if not given:
        free = _cuda_budgets()
        return free or {"cpu": _cpu_budget()}
    on_cuda = [device for device in given if device != "cpu"]
    _check_cuda(on_cuda)
    defaults = {"cpu": _cpu_budget(), **(_cuda_budgets() if None in given.values() else {})}
    budgets = {device: defaults[device] if size is None else size for device, size in given.items()}
    total = memory_bytes()
    if budgets.get("cpu", 0) > total:
        raise ConfigError(
            f"budget cpu={budgets['cpu']}: this machine has {size_text(total)} of memory"
        )
    return budgets


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


def _cuda_budgets() -> dict[str, int]:
    return {f"cuda:{index}": int(CUDA_SHARE * each) for index, each in enumerate(free_gpu_bytes())}


def _check_cuda(devices: list[str]) -> None:
    if not devices:
        return
    count = count_gpus()
    for device in devices:
        if int(device.partition(":")[2]) >= count:
            there = f"0 to {count - 1}" if count else "none"
            raise ConfigError(f"budget of {device}: the CUDA devices of this machine are {there}")
