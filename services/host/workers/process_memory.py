"""What a worker process takes, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

_KV_MARGIN = 32 << 20  # workspaces of steps to come


def process_bytes(pid: int, kv_bytes: int) -> int | None:
    """Memory of its own: without weights, which are a mapped file, and without its KV cache. Pages
    that several processes share count in parts. None if the process has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    sizes = {}
    for line in lines[1:]:
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    return max(0, sizes["Pss_Anon"] + sizes["Pss_Shmem"] - kv_bytes) + _KV_MARGIN
