"""The number of files and sockets that this process may have open."""

from __future__ import annotations

import resource

MAX_DESCRIPTORS = 1 << 20  # programs that close all possible ones take long beyond it


def raise_descriptor_limit() -> None:
    """Raises the soft limit, often 1,024, to the hard one. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
