"""Records runs of pytest that have passed, so that one is skipped while its sources are the same.

Its sources are the project's files that it imported, its test files and what configures models;
the record also holds for one release of each package that computes. HEARTH_COMPILE_AGAIN=1 runs
everything, as does a deletion of `passed` in the cache directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import numpy
import torch
import triton

ROOT = Path(__file__).parents[3]


class PassedRun:
    """`tests`: the folders and files of a run. `folder` holds its record."""

    def __init__(self, tests: Iterable[Path], folder: Path, *, root: Path = ROOT) -> None:
        self._root, self._tests = root, sorted(tests)
        name = blake2b("\n".join(map(str, self._tests)).encode(), digest_size=8).hexdigest()
        self._record = folder / f"run-{name}.txt"

    def is_current(self) -> bool:
        """Whether the run has passed with today's sources."""
        if os.environ.get("HEARTH_COMPILE_AGAIN") or not self._record.exists():
            return False
        digest, *sources = self._record.read_text().split("\n")
        return digest == self._digest(sources)

    def record(self, sources: Iterable[str]) -> None:
        """`sources`: the files that the run imported, from the root."""
        names = sorted(sources)
        self._record.parent.mkdir(parents=True, exist_ok=True)
        self._record.write_text("\n".join((self._digest(names), *names)))

    def _digest(self, sources: Iterable[str]) -> str:
        versions = sys.version, numpy.__version__, torch.__version__, triton.__version__
        digest = blake2b("\n".join(versions).encode(), digest_size=16)
        for name in sorted({*sources, *self._found()}):
            path = self._root / name
            digest.update(f"\n{name}\n".encode())
            digest.update(path.read_bytes() if path.exists() else b"")
        return digest.hexdigest()

    def _found(self) -> set[str]:
        tests = (path for each in self._tests for path in (each, *each.rglob("*.py")))
        settings = self._root.glob("shared/**/*.json")
        files = (path for path in (*tests, *settings) if path.is_file())
        return {str(path.relative_to(self._root)) for path in files}
