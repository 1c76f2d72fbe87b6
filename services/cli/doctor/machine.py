"""Checks of this machine: CPU, memory, disks, limits and ports."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from kernels.cache import cache_root
from services.cli.doctor.check import GIB, Check, by_limit
from services.local.servers import DEFAULT_HTTP_PORT, LOOPBACK
from services.local.state_home import state_home
from shared.errors import ConfigError
from shared.lifecycle.available_memory import CGROUP, free_bytes, text_of

FEW_DESCRIPTORS, TOO_FEW_DESCRIPTORS = 8192, 1024
MEMORY_ADVICE = "End other programs, or serve a smaller model with a smaller --kv-cache-bytes."
_SIMD = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX-512 BF16": "avx512_bf16", "AMX": "amx_bf16"}


def check_machine(own_ports: frozenset[int]) -> Iterator[Check]:
    """Yields the checks. `own_ports` are those of this user's cluster."""
    yield cpu_check(text_of(Path("/proc/cpuinfo")), len(os.sched_getaffinity(0)))
    yield memory_check(text_of(Path("/proc/meminfo")), text_of(CGROUP / "memory.max"))
    yield from _disk_checks()
    yield shared_memory_check()
    yield descriptor_check(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield port_check(DEFAULT_HTTP_PORT, own_ports)


def cpu_check(cpuinfo: str, num_cores: int) -> Check:
    """Checks /proc/cpuinfo for the instructions of the compiled kernels."""
    flags = re.search(r"^flags\s*: (.*)$", cpuinfo, re.MULTILINE)
    found = set(flags[1].split()) if flags else set()
    names = [name for name, flag in _SIMD.items() if flag in found]
    text = f"{num_cores} cores, {', '.join(names) or 'no known vector instructions'}"
    if "AVX-512" in names:
        return Check("CPU", "ok", text if "AMX" in names else f"{text} (no AMX)")
    advice = "Without AVX-512 a CPU worker runs PyTorch's own operations: right, but slower."
    return Check("CPU", "warn", text, advice)


def memory_check(meminfo: str, cgroup_limit: str) -> Check:
    """Checks the memory that is free now, within the limit of a container."""
    free = free_bytes(meminfo)
    if free is None:
        return Check("memory", "warn", "unknown: no /proc/meminfo", MEMORY_ADVICE)
    text = f"{free / GIB:.1f} GiB free"
    if cgroup_limit.strip().isdecimal():
        limit = int(cgroup_limit)
        free, text = min(free, limit), f"{text}, limit of this container {limit / GIB:.1f} GiB"
    return by_limit(
        "memory", free, text, warn_below=2 * GIB, fail_below=GIB / 2, advice=MEMORY_ADVICE
    )


def _disk_checks() -> Iterator[Check]:
    try:
        yield disk_check("state", state_home() / "hearth")
    except ConfigError as error:
        yield Check("disk (state)", "fail", error.message, "Set XDG_STATE_HOME to a folder.")
    yield disk_check("cache", cache_root())


def disk_check(what: str, folder: Path) -> Check:
    """Checks the disk of a folder, or of the one in which it will be made."""
    name, nearest = f"disk ({what})", folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not os.access(nearest, os.W_OK):
        return Check(name, "fail", f"{nearest} cannot be written", "Give this user the folder.")
    free = shutil.disk_usage(nearest).free
    text, advice = f"{free / GIB:.1f} GiB free in {folder}", f"Make room on the disk of {nearest}."
    return by_limit(name, free, text, warn_below=5 * GIB, fail_below=GIB / 2, advice=advice)


def shared_memory_check() -> Check:
    """Checks for memory that processes share by descriptors; /dev/shm is not used."""
    try:
        os.close(os.memfd_create("hearth-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError) as error:
        advice = "Workers on one host and ranks need Linux with memfd_create."
        return Check("shared memory", "fail", f"no memfd: {error}", advice)
    return Check("shared memory", "ok", "memfd with seals (needs no /dev/shm)")


def descriptor_check(hard_limit: int) -> Check:
    """Checks the limit of open files and sockets, to which processes raise their own."""
    unlimited = hard_limit == resource.RLIM_INFINITY
    return by_limit(
        "open files",
        FEW_DESCRIPTORS if unlimited else hard_limit,
        "unlimited" if unlimited else f"at most {hard_limit:,}",
        warn_below=FEW_DESCRIPTORS,
        fail_below=TOO_FEW_DESCRIPTORS,
        advice="Each stream is a socket: raise the hard limit (ulimit -Hn, LimitNOFILE=65536).",
    )


def port_check(port: int, own_ports: frozenset[int]) -> Check:
    if port in own_ports:
        return Check("HTTP port", "ok", f"{port}, of the local cluster")
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((LOOPBACK, port))
        except OSError as error:
            advice = "`hearth up` takes a free port then; --http HOST:PORT chooses one."
            return Check("HTTP port", "warn", f"{port}: {error.strerror}", advice)
    return Check("HTTP port", "ok", f"{port} is free")
