"""The memory of this machine that programs may still take."""

from __future__ import annotations

import re
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_AVAILABLE = re.compile(r"^MemAvailable: +(\d+) kB$", re.MULTILINE)
_CACHED = re.compile(r"^(?:in)?active_file (\d+)$", re.MULTILINE)


def free_bytes(meminfo: str) -> int | None:
    """Returns the bytes that /proc/meminfo calls available; None if it does not tell."""
    found = _AVAILABLE.search(meminfo)
    return None if found is None else int(found[1]) * 1024


def available_bytes(cgroup: Path = CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Returns the bytes that are available on this machine and within the limit of its container;
    None if neither is known.
    """
    limits = [free_bytes(text_of(meminfo)), _left_in(cgroup)]
    return min((each for each in limits if each is not None), default=None)


def text_of(path: Path) -> str:
    """Returns the text of a file of the kernel, or an empty one."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _left_in(cgroup: Path) -> int | None:
    """Returns the bytes that are left in the container, whose cached files can be dropped."""
    limit, used = (text_of(cgroup / f"memory.{name}").strip() for name in ("max", "current"))
    if not (limit.isdecimal() and used.isdecimal()):
        return None
    cached = sum(map(int, _CACHED.findall(text_of(cgroup / "memory.stat"))))
    return max(0, int(limit) - int(used) + cached)
