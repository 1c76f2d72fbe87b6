"""The bytes that travel to a machine without a network: at most 64 MiB with the checkout."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

LIMIT = 64 << 20


class TooLarge(Exception):
    """The size of the pack exceeds the limit."""


def checkout_bytes(root: Path) -> int:
    """Returns the bytes of tracked files, and of those that git would track. Raises
    CalledProcessError.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    found = subprocess.run([*command, "--exclude-standard"], check=True, capture_output=True)
    paths = [root / name.decode() for name in set(found.stdout.split(b"\0")) if name]
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.is_file())


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check(sizes: Mapping[str, int], limit: int = LIMIT) -> None:
    """Prints the sizes and their sum. Raises TooLarge."""
    total = sum(sizes.values())
    for name, num_bytes in {**sizes, "in all": total}.items():
        print(f"{name:20}{num_bytes / 2**20:8.2f} MiB")
    if total > limit:
        raise TooLarge(f"{total / 2**20:.1f} MiB would travel, at most {limit >> 20} MiB can")
