"""What the system allows this process and its children: descriptors, and no core dumps."""

from __future__ import annotations

import resource

MAX_DESCRIPTORS = 1 << 20  # programs that close all possible ones take long beyond it


def raise_descriptor_limit() -> None:
    """Raises the soft limit of files and sockets, often 1,024, to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def forbid_core_dumps() -> None:
    """Lowers the soft limit of a core dump, which would have prompts and KV of tenants, to 0. The
    hard one stays: `prlimit --pid N --core=unlimited` permits a dump of one process.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
