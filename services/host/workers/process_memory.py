"""Reads the memory of a worker process, as the kernel counts it."""

from __future__ import annotations

import re
from pathlib import Path

_SIZE = re.compile(r"^(\w+): +([0-9]+) kB$", re.MULTILINE)
_KV_MARGIN = 32 << 20  # workspaces of steps to come


def process_bytes(pid: int, kv_bytes: int) -> int | None:
    """Returns the memory of a process without weights, which are a mapped file, and
    without its KV cache.

    Pages that several processes share count in parts. None means that the process has ended, or
    that the kernel does not count them: Linux does since 5.4.
    """
    try:
        own_bytes = _own_bytes(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        return None
    return None if own_bytes is None else max(0, own_bytes - kv_bytes) + _KV_MARGIN


def _own_bytes(rollup: str) -> int | None:
    found = dict(_SIZE.findall(rollup))
    if not found.keys() >= {"Pss_Anon", "Pss_Shmem"}:
        return None
    return (int(found["Pss_Anon"]) + int(found["Pss_Shmem"])) * 1024
