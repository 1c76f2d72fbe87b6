"""The stages of workers' starts, from the JSON lines of their logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.session import Row

STAGED = ("loaded", "worker_started")  # events whose fields NAME_s are seconds of stages
LAST = "ready"

Line = dict[str, Any]


def start_rows(folder: Path) -> Iterator[Row]:
    """Yields for each worker's log in a folder, up to `ready`, the seconds of each event since the
    process began, and those of each stage.
    """
    for path in sorted(folder.glob("*.log")):
        lines = list(_until_ready(path))
        if lines and any(each["event"] in STAGED for each in lines):
            yield {"of": f"{path.stem}, events", **_seconds_since_start(lines)}
            yield from _stages(path.stem, lines)


def _until_ready(path: Path) -> Iterator[Line]:
    """Yields none of a process that is not ready."""
    lines = [line for text in path.read_text(errors="replace").splitlines() for line in _line(text)]
    ready = [index for index, each in enumerate(lines) if each["event"] == LAST]
    yield from lines[: ready[0] + 1] if ready else []


def _line(text: str) -> Iterator[Line]:
    try:
        found = json.loads(text)
    except ValueError:  # what a library writes
        return
    if isinstance(found, dict) and {"event", "timestamp"} <= found.keys():
        yield found


def _seconds_since_start(lines: list[Line]) -> dict[str, float]:
    *_, ready = lines
    began_at = _time(ready) - ready["after_s"]
    return {f"{each['event']}_at_s": round(_time(each) - began_at, 2) for each in lines}


def _stages(process: str, lines: list[Line]) -> Iterator[Row]:
    for each in lines:
        if each["event"] in STAGED:
            stages = {name: value for name, value in each.items() if name.endswith("_s")}
            yield {"of": f"{process}, {each['event']}", **stages}


def _time(line: Line) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()
