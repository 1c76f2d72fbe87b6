"""Versions, the device's properties, and its two ceilings: a copy's bandwidth, a product's rate."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess

from benchmarks.gpu_kit.session import Session

PACKAGES = ("torch", "triton", "numpy", "msgspec", "numba", "transformers", "flashinfer-python")
PROPERTIES = (
    *("name", "major", "minor", "total_memory", "multi_processor_count", "L2_cache_size"),
    "shared_memory_per_block_optin",
)
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu,pcie.link.gen.current"
MATMUL = 8192
DATASHEET = {"copy_bytes_s": 4.3e12, "matmul_flops": 790e12}  # measured on another H200


def run(session: Session) -> None:
    session.add(case="python", value=platform.python_version(), cpus=os.cpu_count())
    for package in PACKAGES:
        session.add(case=package, value=_version(package))
    session.need_device()
    import torch

    session.add(case="cuda", value=torch.version.cuda)
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        values = {name: getattr(found, name, None) for name in PROPERTIES}
        session.add(case=f"device {index}", **values)
    for name, value in (("copy_bytes_s", _copy_bandwidth()), ("matmul_flops", _matmul_rate())):
        other = DATASHEET[name]
        session.add(case=name, value=value, predicted=other, error=round(value / other - 1, 3))
    _add_clocks(session)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _copy_bandwidth() -> float:
    """Bytes read and written per second."""
    from benchmarks.kernels.timing import copy_bandwidth

    return copy_bandwidth()


def _matmul_rate() -> float:
    """Operations per second of a BF16 product of random matrices."""
    import torch

    from benchmarks.kernels.timing import random, seconds

    a, b = random(MATMUL, MATMUL), random(MATMUL, MATMUL)
    return 2.0 * MATMUL**3 / seconds(lambda: torch.mm(a, b))


def _add_clocks(session: Session) -> None:
    """Reads the clocks right after work. They are never set."""
    if shutil.which("nvidia-smi") is None:
        session.add(case="clocks", value=None)
        return
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    session.add(case="clocks", columns=CLOCKS, value=found.stdout.strip().splitlines())
