"""A digest of the sources of an operation's kernel, which tells rows of unlike kernels apart."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"


@cache
def sources_digest(ops: tuple[str, ...]) -> str:
    """Returns a digest of the modules kernels/gpu/*/OP.py and of all of `kernels` that they import.

    Raises ValueError for an operation without such a module.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(_imported(_module_of(op) for op in ops)):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def all_sources_digest() -> str:
    """Returns a digest of every module of `kernels` except those for CPUs."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(KERNELS.rglob("*.py")):
        if path.is_relative_to(KERNELS / "cpu"):
            continue
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _module_of(op: str) -> Path:
    found = sorted((KERNELS / "gpu").glob(f"*/{op}.py"))
    if not found:
        raise ValueError(f"no kernel {op!r}: there is no kernels/gpu/*/{op}.py")
    return found[0]


def _imported(paths: Iterable[Path]) -> set[Path]:
    """Returns the files and what they import of `kernels`, directly or not."""
    found: set[Path] = set()
    left = list(paths)
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += _direct_imports(path)
    return found


def _direct_imports(path: Path) -> list[Path]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    files = (ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("kernels."))
    return [file for file in files if file.exists()]
