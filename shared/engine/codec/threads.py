"""The threads that encode and decode; the functions that they call release the GIL."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor


def coding_threads(num_threads: int | None = None) -> ThreadPoolExecutor:
    """Returns an executor with `num_threads`, by default one per CPU that this process may use."""
    return ThreadPoolExecutor(num_threads or len(os.sched_getaffinity(0)), "codec")
