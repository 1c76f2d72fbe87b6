"""The kit's output folder: few and small files, complete at all times.

summary.json          what ran, the status of each part, predictions compared with measurements
rows.jsonl            one line per measurement
log.txt               the end of each part's output
triton_cache.tar.gz   compiled kernels: if OUT has them, the next run starts warm
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

LOG_BYTES = 256 << 10  # per part
MAX_ARCHIVE_BYTES = 15 << 20
CACHED = (".cubin", ".json", ".so")  # the files that a kernel is loaded from; others are for humans


class Outputs:
    def __init__(self, folder: Path, work: Path) -> None:
        """`work` holds Triton's cache; it may be deleted after the run."""
        folder.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        self.rows = folder / "rows.jsonl"
        self.log = folder / "log.txt"
        self.cache = work / "triton_cache"
        self._summary = folder / "summary.json"
        self._archive = folder / "triton_cache.tar.gz"
        self.rows.write_bytes(b"")
        self.log.write_bytes(b"")

    def write_summary(self, summary: dict[str, Any]) -> None:
        temporary = self._summary.with_suffix(".tmp")
        temporary.write_text(json.dumps(summary, indent=1) + "\n")
        temporary.replace(self._summary)

    def shorten_log(self, start: int) -> None:
        """Truncates the part since `start` to its end."""
        with self.log.open("r+b") as file:
            file.seek(start)
            added = file.read()
            if len(added) > LOG_BYTES:
                file.seek(start)
                file.write(b"[...]\n" + added[-LOG_BYTES:])
                file.truncate()

    def count_rows(self) -> int:
        return self.rows.read_bytes().count(b"\n")

    def predictions(self) -> list[dict[str, Any]]:
        """The rows with a prediction, with the error of each."""
        rows = map(json.loads, self.rows.read_text().splitlines())
        return [row for row in rows if "error" in row and "case" in row]

    def unpack_cache(self) -> bool:
        """Returns whether a cache exists, from this run's folder or from the last run."""
        if self._archive.exists() and not self.cache.exists():
            try:
                with tarfile.open(self._archive) as archive:
                    archive.extractall(self.cache, filter="data")
            except (OSError, tarfile.TarError) as error:
                print(f"gpu_kit: {self._archive} cannot be unpacked: {error}")
        return self.cache.exists()

    def pack_cache(self) -> None:
        """Replaces the archive, unless it would be too large to send."""
        if not self.cache.exists():
            return
        temporary = self._archive.with_suffix(".tmp")
        with tarfile.open(temporary, "w:gz", compresslevel=6) as archive:
            for path in sorted(self.cache.rglob("*")):
                if path.is_file() and path.suffix in CACHED:
                    archive.add(path, path.relative_to(self.cache))
        if temporary.stat().st_size > MAX_ARCHIVE_BYTES:
            temporary.unlink()
        else:
            temporary.replace(self._archive)


def code_identity(root: Path) -> dict[str, str]:
    """The commit, if known, and a digest of the kernels, which does not need git."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted((root / "kernels").rglob("*.py")):
        digest.update(path.read_bytes())
    return {"commit": _commit(root), "kernels": digest.hexdigest()}


def _commit(root: Path) -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
