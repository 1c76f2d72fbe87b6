"""The short run's part of a test's grid of parameters; the rest is marked `long`.

In the cells that stay, each value of each parameter occurs at least once: a grid of 5 · 2 · 2 cells
keeps 5. `@pytest.mark.each_value` asks for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def thin(items: Iterable[pytest.Item]) -> None:
    """Marks what is left out. Cells that are `long` or skipped already stand for no value."""
    grids: dict[tuple[Any, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not _is_left_out(item):
            grids[item.path, getattr(item, "cls", None), item.originalname].append(item)
    for grid in grids.values():
        cells = [frozenset(enumerate(_ids_of(item))) for item in grid]
        for index in set(range(len(grid))) - covering(cells):
            grid[index].add_marker(pytest.mark.long)


def covering(cells: Sequence[frozenset[Any]]) -> set[int]:
    """Indices of few cells, sets of (parameter, value), in which every value of all occurs."""
    missing, chosen = frozenset[Any]().union(*cells), set[int]()
    while missing:
        best = max(range(len(cells)), key=lambda index: (len(cells[index] & missing), -index))
        chosen.add(best)
        missing -= cells[best]
    return chosen or {0}


def _ids_of(item: Any) -> list[str]:
    """One of each `parametrize` and each fixture: pytest's indices number the cells instead."""
    return list(item.callspec._idlist)


def _is_left_out(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None or any(
        mark.args[:1] == (True,) for mark in item.iter_markers("skipif")
    )
