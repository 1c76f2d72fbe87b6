"""The number of tasks into which a kernel's work is cut.

There are more tasks than threads: a thread whose core another process uses finishes fewer of them,
and the others do not wait for it. numba assigns them one by one if its chunk size is 1, otherwise
in as many equal shares as there are threads.
"""

from __future__ import annotations

import numba

TASKS_PER_THREAD = 4


def num_tasks(most: int) -> int:
    """The number of tasks for work of at most `most` parts."""
    num_threads = numba.get_num_threads()
    return min(num_threads * TASKS_PER_THREAD, most) if num_threads > 1 else 1
