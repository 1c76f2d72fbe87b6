"""The threads that code and decode: what they call leaves Python's lock."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor


def coding_threads(num_threads: int | None = None) -> ThreadPoolExecutor:
    """One a CPU that this process may use."""
    return ThreadPoolExecutor(num_threads or len(os.sched_getaffinity(0)), "codec")
