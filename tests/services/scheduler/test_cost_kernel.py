"""The compiled loops' place in numba's cache, which several schedulers of a host share."""

from __future__ import annotations

import subprocess
import sys

# A lock of one's own process keeps out, too, whoever opens the file anew.
SOURCE = """
import fcntl
from pathlib import Path
from numba.core.caching import IndexDataCacheFile

def is_locked(folder):
    with Path(folder, "scan.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

found = []
load = IndexDataCacheFile.load
def load_watched(self, key):
    found.append(is_locked(self._cache_path))
    return load(self, key)

IndexDataCacheFile.load = load_watched
import services.scheduler.cost_kernel
print(len(found) > 1, all(found))
"""


def test_one_process_at_a_time_reads_and_fills_the_cache() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SOURCE], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["True", "True"]
