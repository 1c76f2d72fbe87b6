"""The recorded tables: what each launch class uses, with a file for each release of Triton."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

from tests.kernels.support.ahead_of_time import MachineCode

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
HEAD = """
# What the kernels compile to

For compute capability 9.0, ahead of time: the most that a launch class of each kernel uses, over
all families, modes and stored forms of weights and KV, with Triton {releases}. Limits: 227 KiB of
shared memory, 255 registers; local loads are of registers that do not fit. Copies: of 16 bytes to
shared memory without waiting, the fewest of a class. No product's operand is overwritten too early.
`python -m tests.kernels.compiled.compile_table --write` records a row for each class, with the
installed Triton, and this page; `--resume` compiles only classes without a row.
"""


@dataclass(frozen=True)
class Row:
    """`overwritten`: products of which an operand is overwritten before they have read it.
    `wide_copies`: instructions that copy 16 bytes to shared memory without waiting.
    `has_products`: on tensor cores.
    """

    registers: int
    local_loads: int
    overwritten: int
    shared_bytes: int
    wide_copies: int
    has_products: bool

    @classmethod
    def of(cls, code: MachineCode) -> Row:
        return cls(
            registers=code.num_registers,
            local_loads=code.num_local_loads,
            overwritten=code.num_overwritten,
            shared_bytes=code.shared_bytes,
            wide_copies=code.num_wide_copies,
            has_products=bool(code.dot_layouts),
        )


Table: TypeAlias = dict[str, dict[str, Row]]  # kernel -> key of a launch class -> its row


def releases() -> list[Path]:
    """The oldest first."""
    return sorted(FOLDER.glob("triton-*.json"))


def recorded(file: Path) -> Table:
    return {
        kernel: {key: Row(*row) for key, row in rows.items()}
        for kernel, rows in json.loads(file.read_text()).items()
    }


def store(table: Table, file: Path) -> None:
    """Writes a line for each class."""
    kernels = []
    for kernel, rows in sorted(table.items()):
        lines = [
            f'  "{key}": {json.dumps(astuple(row))}'
            for key, row in sorted(rows.items(), key=itemgetter(0))
        ]
        kernels.append(f' "{kernel}": {{\n' + ",\n".join(lines) + "\n }")
    file.write_text("{\n" + ",\n".join(kernels) + "\n}\n")


def recorded_sources(file: Path) -> dict[str, str]:
    """Kernel -> digest of the source from which its rows in `file` were recorded, if known."""
    sources = _sources_of(file)
    return json.loads(sources.read_text()) if sources.is_file() else {}


def store_sources(sources: Mapping[str, str], file: Path) -> None:
    _sources_of(file).write_text(json.dumps(dict(sources), indent=1, sort_keys=True) + "\n")


def _sources_of(file: Path) -> Path:
    return file.with_name(file.name.replace("triton-", "sources-"))


def readme() -> str:
    tables = {file.stem.removeprefix("triton-"): recorded(file) for file in releases()}
    columns = [f"{use} ({release})" for release in tables for use in USES]
    lines = [
        HEAD.format(releases=" and ".join(tables)).strip(),
        "",
        "| kernel | classes | " + " | ".join(columns) + " |",
        "| --- |" + " ---: |" * (len(columns) + 1),
    ]
    for kernel, rows in next(iter(tables.values())).items():
        cells = [cell for table in tables.values() for cell in _cells(table[kernel].values())]
        lines.append(f"| `{kernel}` | {len(rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


USES = ("registers", "local loads", "KiB", "copies")


def _cells(rows: Iterable[Row]) -> list[str]:
    found = list(rows)
    copies = [row.wide_copies for row in found if row.has_products]
    return [
        str(max(row.registers for row in found)),
        str(max(row.local_loads for row in found)),
        str(-(-max(row.shared_bytes for row in found) // 1024)),
        str(min(copies)) if copies else "",
    ]
