"""This machine's runtime, software, tools and device, and the device's two ceilings.

Everything that needs no torch comes first. The ceilings are the bandwidth of a copy and the rate of
a GEMM, beside those of other cards of the name.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.ceilings import assumed, copy_rate
from benchmarks.gpu_kit.failures import unavailable_as_row
from benchmarks.gpu_kit.session import Session

PACKAGES = ("torch", "triton", "numpy", "msgspec", "numba", "transformers", "nvidia-cudnn-cu13")
TOOLS = ("gcc", "nvcc", "ncu", "compute-sanitizer", "nvidia-smi", "nvidia-cuda-mps-control")
FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/bin")
MPS_FOLDER = "/tmp/nvidia-mps"  # default folder of the pipes
PROPERTIES = (
    *("name", "major", "minor", "total_memory", "multi_processor_count", "L2_cache_size"),
    *("shared_memory_per_block_optin", "memory_clock_rate", "memory_bus_width"),
)
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
LINK = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current"
COPY_BYTES, MATMUL = 2 << 30, 8192
EPS = 1e-5


def run(session: Session) -> None:
    session.add(case="runtime", **runtime())
    session.add(case="packages", python=platform.python_version(), **versions())
    paths: dict[str, Any] = {name: find_tool(name) for name in TOOLS}
    session.add(case="tools", **paths)
    session.add(case="mps", is_installed=find_tool(TOOLS[-1]) is not None, is_running=has_mps())
    add_launch(session)
    if session.is_dry:
        return
    add_device(session)
    add_ceilings(session)
    add_links(session)
    session.add(case="clocks", columns=CLOCKS, value=query_device(CLOCKS))


def runtime() -> dict[str, Any]:
    version = _read("/proc/version").strip()
    name = runtime_of(version, _read("/proc/cmdline"))
    return {"runtime": name, "version": version, "cpus": os.cpu_count()}


def runtime_of(version: str, command_line: str) -> str:
    """gVisor answers as an old kernel; Firecracker shows in what its kernel was started with."""
    if "gvisor" in version.lower() or "Linux version 4.4.0 #1 SMP Sun Jan 10" in version:
        return "gVisor"
    if "virtio_mmio.device" in command_line or "firecracker" in command_line:
        return "Firecracker"
    return "bare" if version else "unknown"


def versions() -> dict[str, Any]:
    return {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_tool(name: str) -> str | None:
    """Returns the path of a command; those of CUDA are not always on the PATH."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS])
    return shutil.which(name, path=path)


def has_mps() -> bool:
    """Whether processes share the device through a server, rather than in turn."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_FOLDER)
    return (Path(folder) / "control").exists()


def add_launch(session: Session) -> None:
    """The time of this process's first launch: the imports, and the compiler or its cache."""
    started = time.perf_counter()
    from kernels.gpu.rows.rms_norm import rms_norm

    hidden = session.shapes.hidden
    rms_norm(session.random(1, hidden), session.random(hidden), EPS)
    session.synchronize()
    took_s = None if session.is_dry else round(time.perf_counter() - started, 2)
    session.add(case="first launch", seconds=took_s)


def add_device(session: Session) -> None:
    session.need_device()
    import torch

    session.add(case="cuda", value=torch.version.cuda, link=query_device(LINK), columns=LINK)
    found = torch.cuda.get_device_properties(0)
    values: dict[str, Any] = {name: getattr(found, name, None) for name in PROPERTIES}
    session.add(case="device", count=torch.cuda.device_count(), **values)


def add_ceilings(session: Session) -> None:
    """Adds a row for each ceiling.

    `predicted` is the value of cards of this name, or else follows from the memory's clock and
    width.
    """
    import torch

    properties = torch.cuda.get_device_properties(0)
    measured = {"copy_bytes_s": copy_bandwidth(session), "matmul_flops": matmul_rate(session)}
    for name, value in measured.items():
        other = assumed(properties.name, name)
        if other is None and name == "copy_bytes_s":
            other = copy_rate(properties)
        error = None if other is None else round(value / other - 1, 3)
        session.add(case=name, value=value, predicted=other, error=error)


def copy_bandwidth(session: Session) -> float:
    """Returns the bytes read and written per second."""
    source = session.empty(COPY_BYTES // 2).normal_()
    target = session.empty(COPY_BYTES // 2)
    return 2 * COPY_BYTES / _seconds(session, lambda: target.copy_(source))


def matmul_rate(session: Session) -> float:
    """Returns the operations per second of a BF16 product of random matrices."""
    import torch

    a, b = session.random(MATMUL, MATMUL), session.random(MATMUL, MATMUL, seed=1)
    return 2.0 * MATMUL**3 / _seconds(session, lambda: torch.mm(a, b))


def _seconds(session: Session, call: Any) -> float:
    took = session.seconds(call)
    assert took is not None, "a device measures"
    return took


def add_links(session: Session) -> None:
    """Whether the GPU can copy to shared memory of the host, and other processes to its own."""
    from benchmarks.gpu_kit.machine.memory_links import registered_memfd, share

    with unavailable_as_row(session, "cudaHostRegister"), registered_memfd(1 << 20) as memory:
        session.add(case="cudaHostRegister", works=memory.is_pinned())
    with unavailable_as_row(session, "CUDA IPC"):
        session.add(case="CUDA IPC", works=bool(share(session.empty(1 << 20))))


def query_device(columns: str) -> list[str] | None:
    """Returns nvidia-smi's values of the devices, or None without nvidia-smi. It never sets
    clocks.
    """
    command = find_tool("nvidia-smi")
    if command is None:
        return None
    query = [command, f"--query-gpu={columns}", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    return found.stdout.strip().splitlines()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
