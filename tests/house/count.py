"""Counts what may grow while each commit is clean: rooms, arrows and floors of a folder, long files
and functions, full folders.

Run: python -m tests.house.count [--at COMMIT ...]    one column for each commit; HEAD by default

A room is a module or subfolder of a folder, an arrow a pair of rooms of which one imports the
other, floors the longest chain of such imports. Nothing here is judged: `tests/test_imports.py` and
`test_house.py` do that.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath as Path

from rich.console import Console
from rich.table import Table

PRODUCT = ("kernels", "services", "shared")
FOLDERS = (
    *("services", "services/gateway", "services/gateway/request", "services/scheduler"),
    *("services/cli", "shared", "shared/engine", "shared/engine/executors", "kernels"),
)
LONG_FILE, LONG_FUNCTION, FULL_FOLDER = 300, 60, 16
Sources = dict[Path, ast.Module]


def sources_at(commit: str) -> tuple[dict[Path, str], Sources]:
    """The modules of the product at a commit, as text and parsed."""
    archive = subprocess.run(["git", "archive", commit, *PRODUCT], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        texts = {
            Path(each.name): found.read().decode()
            for each in files
            if each.name.endswith(".py") and (found := files.extractfile(each)) is not None
        }
    return texts, {path: ast.parse(text) for path, text in texts.items()}


def imports(trees: Sources) -> Iterator[tuple[Path, Path]]:
    """(module, module of the product that it imports)."""

    @cache
    def module_of(name: str) -> Path | None:
        path = Path(*name.split("."))
        found = (each for each in (path.with_suffix(".py"), path / "__init__.py") if each in trees)
        parent = name.rpartition(".")[0]
        return next(found, module_of(parent) if parent else None)

    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{each.name}" for each in node.names]
            yield from ((path, found) for each in names if (found := module_of(each)))


def room_of(path: Path, folder: Path) -> str:
    """The module or subfolder that contains `path`; empty outside, and for `__init__.py`."""
    if folder not in path.parents:
        return ""
    return path.relative_to(folder).with_suffix("").parts[0].removeprefix("__init__")


def shape(pairs: list[tuple[Path, Path]], paths: list[Path], name: str) -> str:
    """Returns `rooms/arrows/floors` of a folder."""
    folder, below = Path(name), defaultdict[str, set[str]](set)
    rooms = {room_of(path, folder) for path in paths} - {""}
    for importer, found in pairs:
        source, target = room_of(importer, folder), room_of(found, folder)
        if source and target and source != target:
            below[source].add(target)

    @cache
    def floors(room: str) -> int:
        return 1 + max(map(floors, below[room]), default=0)

    return f"{len(rooms)}/{sum(map(len, below.values()))}/{max(map(floors, rooms), default=0)}"


def counts(commit: str) -> dict[str, str]:
    texts, trees = sources_at(commit)
    pairs, paths = list(imports(trees)), list(trees)
    lengths = [
        node.end_lineno - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    modules = Counter(path.parent for path in paths if path.name != "__init__.py")
    lines = [text.count("\n") for text in texts.values()]
    long_functions = sum(length > LONG_FUNCTION for length in lengths)
    return {
        **{f"{each}: rooms/arrows/floors": shape(pairs, paths, each) for each in FOLDERS},
        "lines": f"{sum(lines):,}",
        f"files of more than {LONG_FILE} lines": str(sum(n > LONG_FILE for n in lines)),
        f"functions of more than {LONG_FUNCTION} lines": str(long_functions),
        f"folders of {FULL_FOLDER} modules": str(sum(n >= FULL_FOLDER for n in modules.values())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--at", nargs="+", default=["HEAD"], metavar="COMMIT")
    commits = parser.parse_args().at
    columns = [counts(each) for each in commits]
    table = Table("what", *(each[:12] for each in commits), box=None)
    for name in columns[-1]:
        table.add_row(name, *(column.get(name, "") for column in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
