"""The memory of a worker, from what the kernel counts of it."""

from __future__ import annotations

import os
from pathlib import Path

from services.host.workers import process_memory

OLD = "00400000-7fff0000 ---p 00000000 00:00 0 [rollup]\nRss: 884 kB\nPss: 385 kB\n"
NEW = f"{OLD}Pss_Anon: 301 kB\nPss_File: 80 kB\nPss_Shmem: 4 kB\n"


def test_anonymous_and_shared_memory_count() -> None:
    assert process_memory._own_bytes(NEW) == 305 * 1024


def test_kernel_that_does_not_count_shared_pages_gives_nothing() -> None:
    """Linux before 5.4."""
    assert process_memory._own_bytes(OLD) is None


def test_memory_of_this_process() -> None:
    own = process_memory._own_bytes(Path(f"/proc/{os.getpid()}/smaps_rollup").read_text())
    assert own is None or own > 1 << 20
