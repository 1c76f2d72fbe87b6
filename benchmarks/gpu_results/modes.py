"""Puts the measured cost of exact results into `modes.json`, which `--mode auto` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu_results.runs import Row
from shared.engine.executors.loading.mode_choice import MeasuredDevice

PATH = Path("shared/engine/modes.json")
FIELDS = MeasuredDevice.__struct_fields__


def measured_modes(rows: Iterable[Row]) -> list[MeasuredDevice]:
    """Returns the rows of the part `modes`. Raises msgspec.ValidationError if a column has another
    type.
    """
    complete = (row for row in rows if row["part"] == "modes" and set(FIELDS) <= row.keys())
    return [
        msgspec.convert({name: row[name] for name in FIELDS}, MeasuredDevice) for row in complete
    ]


def update(measured: Iterable[MeasuredDevice], path: Path) -> None:
    """A row replaces that of the same device and version of the kernels."""
    before = msgspec.json.decode(path.read_bytes(), type=list[MeasuredDevice])
    rows = {(row.device, row.kernels): row for row in [*before, *measured]}
    plain: list[Any] = [msgspec.to_builtins(row) for row in rows.values()]
    path.write_text(json.dumps(plain, indent=1) + "\n")
