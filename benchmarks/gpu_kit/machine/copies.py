"""Bandwidths between host and device, and between two processes on one GPU.

Pinned, pageable and registered memory of the host; the memory of a GPU that another process has
opened, which `python -m benchmarks.gpu_kit.machine.copies` reads. Without a device, a payload is
gathered and scattered once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kit.failures import unavailable_as_row
from benchmarks.gpu_kit.machine.memory_links import open_shared, registered_memfd, share
from benchmarks.gpu_kit.session import Session
from tests.support.kernels.cases import kv

MIB = 1 << 20
SIZES = (MIB, 32 * MIB, 256 * MIB)
MOST_BYTES = 512 * MIB  # most bytes to copy for one figure
READER_S = 15  # for its import of torch
ROOT = Path(__file__).resolve().parents[3]


def run(session: Session) -> None:
    if session.is_dry:
        for move in (kv.gather_blocks, kv.scatter_blocks):
            move(session.inputs, is_fp8=False)
        return
    with reader() as other:  # the other process imports torch meanwhile
        for size in SIZES:
            for kind, memory in HOST_MEMORIES.items():
                measure_host(session, size, kind, memory)
        with unavailable_as_row(session, "CUDA IPC"):
            measure_shared(session, other)


@contextmanager
def pinned(num_bytes: int) -> Iterator[Tensor]:
    yield torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@contextmanager
def pageable(num_bytes: int) -> Iterator[Tensor]:
    yield torch.zeros(num_bytes, dtype=torch.uint8)


Memory = Callable[[int], Any]  # a context with a tensor of so many bytes
HOST_MEMORIES: dict[str, Memory] = {
    "pinned": pinned,
    "pageable": pageable,
    "registered memfd": registered_memfd,
}


def measure_host(session: Session, size: int, kind: str, memory: Memory) -> None:
    case = f"{kind}, {size // MIB} MiB"
    with unavailable_as_row(session, case), memory(size) as host:
        device = torch.empty(size, dtype=torch.uint8, device=session.device)
        times = {
            "h2d": session.seconds(lambda: device.copy_(host, non_blocking=True), repeats(size)),
            "d2h": session.seconds(lambda: host.copy_(device, non_blocking=True), repeats(size)),
        }
        rates: dict[str, Any] = {f"{name}_gb_s": rate(size, took) for name, took in times.items()}
        session.add(case=case, is_pinned=host.is_pinned(), **rates)


def measure_shared(session: Session, other: subprocess.Popen[str]) -> None:
    size = max(SIZES)
    source = torch.full((size,), 7, dtype=torch.uint8, device=session.device)
    session.synchronize()
    given = json.dumps(share(source))
    answer, error = other.communicate(given, timeout=min(READER_S, max(1.0, session.left_s - 1)))
    if other.returncode:
        reason = error.strip().rpartition("\n")[2]
        raise RuntimeError(f"the reader ended with status {other.returncode}: {reason}")
    session.add(case="CUDA IPC", **json.loads(answer.strip().rpartition("\n")[2]))


@contextmanager
def reader() -> Iterator[subprocess.Popen[str]]:
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-m", "benchmarks.gpu_kit.machine.copies"]
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def read_shared() -> None:
    """Copies the memory that standard input names, and prints the rate."""
    session = Session("copies", Path(os.devnull))
    source = open_shared(json.load(sys.stdin))
    target = torch.empty_like(source)
    took = session.seconds(lambda: target.copy_(source), repeats(source.nbytes))
    is_equal = bool((target == 7).all())
    print(json.dumps({"gb_s": rate(source.nbytes, took), "is_equal": is_equal}), flush=True)


def repeats(size: int) -> int:
    return max(2, min(20, MOST_BYTES // size))


def rate(size: int, took: float | None) -> float | None:
    return None if took is None else round(size / took / 1e9, 2)


if __name__ == "__main__":
    read_shared()
