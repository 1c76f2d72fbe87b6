"""Compares a part of the surface with its record, or writes the record."""

from __future__ import annotations

import json
import os
from difflib import unified_diff
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"
ROOT = Path(__file__).parents[2]
COMMAND = "HEARTH_WRITE_SURFACE=1 scripts/test -k surface"


def check_record(name: str, text: str) -> None:
    """Raises AssertionError with the difference, unless records are to be written. A record is the
    same wherever the repository lies.
    """
    path = RECORDS / name
    text = text.rstrip("\n").replace(f"{ROOT}/", "") + "\n"
    if os.environ.get("HEARTH_WRITE_SURFACE"):
        path.write_text(text)
        return
    before = path.read_text() if path.exists() else ""
    lines = unified_diff(before.splitlines(), text.splitlines(), name, "the code", lineterm="")
    assert before == text, "\n".join([*lines, f"If this is intended: {COMMAND}"])


def json_lines(value: Any, depth: int) -> str:
    """JSON whose lists and objects have a line for each entry down to `depth`."""
    if not depth or not value or not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        rows = [json_lines(each, depth - 1) for each in value]
        return "[\n" + ",\n".join(rows) + "\n]"
    named = [f"{json.dumps(name)}: {json_lines(each, depth - 1)}" for name, each in value.items()]
    return "{\n" + ",\n".join(named) + "\n}"
