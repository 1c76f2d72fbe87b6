"""The short run's part of a test's grid of parameters; the rest is marked `long`.

In the cells that stay, each value of each parameter occurs at least once: a grid of 5 · 2 · 2 cells
keeps 5. `@pytest.mark.each_value` asks for it; `each_value(2)` keeps the first two of these, which
differ in every parameter, `each_value(1)` the first cell.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
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
        mark = grid[0].get_closest_marker("each_value")
        for index in set(range(len(grid))) - covering(cells, *(mark.args if mark else ())):
            grid[index].add_marker(pytest.mark.long)


def in_short_run(short: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of all cases, of which those that are not `short` are left to the long run."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in short else pytest.mark.long,
        )
        for case in cases
    ]


def in_one_test(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Any], Any]:
    """Parametrizes a test like `pytest.mark.parametrize`, but runs all cases in one test.

    It is for tables of cheap cases: a test takes up to 20 ms besides its own time. A failure names
    its case in a note.
    """
    wanted = [each.strip() for each in names.split(",")] if isinstance(names, str) else [*names]
    rows = [dict(zip(wanted, _values(case, wanted), strict=True)) for case in cases]
    assert rows

    def decorated(test: Any) -> Any:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            for row in rows:
                with _noting(row):
                    test(**fixtures, **row)

        @wraps(test)
        async def run_async(**fixtures: Any) -> None:
            for row in rows:
                with _noting(row):
                    await test(**fixtures, **row)

        found: Any = run_async if inspect.iscoroutinefunction(test) else run
        signature = inspect.signature(test)
        fixtures = [each for each in signature.parameters.values() if each.name not in wanted]
        found.__signature__ = signature.replace(parameters=fixtures)
        return found

    return decorated


def _values(case: Any, names: Sequence[str]) -> Sequence[Any]:
    return case if len(names) > 1 else (case,)


@contextmanager
def _noting(row: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {row}")
        raise


def covering(cells: Sequence[frozenset[Any]], at_most: int = sys.maxsize) -> set[int]:
    """Indices of few cells, sets of (parameter, value), in which every value of all occurs; or the
    first `at_most` that are found.
    """
    missing, chosen = frozenset[Any]().union(*cells), set[int]()
    while missing and len(chosen) < at_most:
        best = max(range(len(cells)), key=lambda index: (len(cells[index] & missing), -index))
        chosen.add(best)
        missing -= cells[best]
    return chosen or {0}


def _ids_of(item: Any) -> list[str]:
    """Returns an id for each `parametrize` and each fixture, where pytest's indices number the
    cells.
    """
    return list(item.callspec._idlist)


def _is_left_out(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None or any(
        mark.args[:1] == (True,) for mark in item.iter_markers("skipif")
    )
