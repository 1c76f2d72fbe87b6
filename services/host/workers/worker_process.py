"""A worker process of a host: reads its configuration on standard input, which no other process
sees, and serves both roles.

    python -m services.host.workers.worker_process < spec
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from services.local.processes.environ import thread_environ
from shared.config import WorkerConfig


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    config: WorkerConfig
    log_path: str


def encode_spec(spec: WorkerSpec) -> bytes:
    """Returns the spec as one line of JSON."""
    return msgspec.json.encode(spec, enc_hook=_encoded) + b"\n"


def decode_spec(line: bytes) -> WorkerSpec:
    return msgspec.json.decode(line, type=WorkerSpec, dec_hook=lambda kind, value: kind(value))


def _encoded(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(type(value))


def set_thread_environ(num_threads: int) -> None:
    """Sets the number of threads; 0 means all cores. Must be called before math libraries are
    loaded, which read it.
    """
    count = num_threads or len(os.sched_getaffinity(0))
    # numpy's own pool would be threads of a process that forks; nothing here multiplies with it
    for name, value in {**thread_environ(count), "OPENBLAS_NUM_THREADS": "1"}.items():
        os.environ.setdefault(name, value)


def run_worker(config: WorkerConfig) -> int:
    """Returns the exit status."""
    from services.worker.worker import build_worker
    from shared.lifecycle.process import run_service

    return run_service(config, lambda: build_worker(config, ("prefill", "decode")))


def main() -> None:
    spec = decode_spec(sys.stdin.buffer.readline())
    set_thread_environ(spec.config.num_threads)
    status = run_worker(spec.config)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the teardown of torch's modules would take a second


if __name__ == "__main__":
    main()
