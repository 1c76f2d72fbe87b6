"""The kit's output folder: few and small files, complete at all times.

summary.json   what ran, the status of each part, predictions compared with measurements
rows.jsonl     one line per measurement
log.txt        the end of each part's output
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.session import read_rows

LOG_BYTES = 256 << 10  # per part
ROWS = "rows.jsonl"


class Outputs:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = folder / ROWS
        self.log = folder / "log.txt"
        self._summary = folder / "summary.json"
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
        """Returns the rows with a prediction, with the error of each."""
        return [row for row in read_rows(self.rows) if "error" in row and "case" in row]


def commit_of(root: Path) -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
        changed += git("ls-files", "--others", "--exclude-standard", "--", "*.py")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
