"""Prints the README's table of measured figures from the committed results.

python -m benchmarks.readme_table            print it
python -m benchmarks.readme_table --write    put it into README.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- table: benchmarks/readme_table.py -->\n"
END = "<!-- end of table -->"


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def table() -> str:
    """Markdown; one block of rows a result file, each with its command and commit."""
    parts = []
    for name, title in TITLES.items():
        found = result(name)
        columns = COLUMNS[name]
        lines = [
            f"**{title}** — {machine_of(found)}, commit `{found['commit'][:9]}`, "
            f"`{found['command']}`",
            "",
            "| " + " | ".join(columns) + " |",
            "| " + " | ".join("---" for _ in columns) + " |",
        ]
        for row in found["rows"]:
            lines.append("| " + " | ".join(_shown(row[key]) for key in columns.values()) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


TITLES: dict[str, str] = {}
COLUMNS: dict[str, dict[str, str]] = {}


def machine_of(found: dict[str, Any]) -> str:
    machine = found["machine"]
    return machine if isinstance(machine, str) else ", ".join(str(v) for v in machine.values())


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def replaced(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + table() + "\n" + END + after


def main() -> None:
    if "--write" in sys.argv:
        path = ROOT / "README.md"
        path.write_text(replaced(path.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
