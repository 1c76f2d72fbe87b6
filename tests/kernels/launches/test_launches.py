"""Checks the arguments of every launch of a Triton kernel, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kernels.gpu

FOLDER = Path(kernels.gpu.__file__ or "").parent


def launches() -> Iterator[tuple[str, ast.Call]]:
    """Yields each `kernel[grid](...)` with its location."""
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                yield f"{path.relative_to(FOLDER)}:{node.lineno}", node


def test_every_launch_sets_enable_fp_fusion() -> None:
    """Triton's default is about to change, which would change the bits of kernels relying on it."""
    found = dict(launches())
    assert len(found) > 15
    unset = [
        location
        for location, call in found.items()
        if not any(
            each.arg == "enable_fp_fusion"
            and isinstance(each.value, ast.Constant)
            and type(each.value.value) is bool
            for each in call.keywords
        )
    ]
    assert unset == []
