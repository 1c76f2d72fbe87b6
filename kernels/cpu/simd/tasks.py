"""Into how many tasks a kernel's work is cut.

Into more than there are threads: one whose core another process wants gets less of them done, and
the others do not wait for it. numba hands them out one by one where its chunk size is set to 1, in
as many equal shares as there are threads where it is not.
"""

from __future__ import annotations

import numba

TASKS_PER_THREAD = 4


def num_tasks(most: int) -> int:
    """For work of at most so many parts."""
    num_threads = numba.get_num_threads()
    return min(num_threads * TASKS_PER_THREAD, most) if num_threads > 1 else 1
