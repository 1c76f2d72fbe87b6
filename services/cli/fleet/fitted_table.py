"""Tables that fit the terminal: columns are left out by rank, and no cell is ever cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.table import Table
from rich.text import Text

Row = TypeVar("Row")
Cell = str | Text
GAP = 2  # cells between columns


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column of a table. The one with the highest `rank` is left out first, one of rank 0 never.
    Without a value in any row it is left out, too.
    """

    heading: str
    cell: Callable[[Row], Cell]
    rank: int = 0
    is_number: bool = False


def fitted_table(
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    width: int,
    *,
    style: Callable[[Row], str] = lambda row: "",
) -> Table:
    """Returns a table of at most `width` cells, as long as its columns of rank 0 fit; they wrap
    otherwise.
    """
    cells = {each.heading: [each.cell(row) for row in rows] for each in columns}
    shown = [each for each in columns if not each.rank or _has_value(cells[each.heading])]
    widths = {each.heading: _width(each.heading, cells[each.heading]) for each in shown}
    while sum(widths[each.heading] + GAP for each in shown) - GAP > width:
        last = max(shown, key=lambda each: each.rank)
        if not last.rank:
            break
        shown.remove(last)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for each in shown:
        justify = "right" if each.is_number else "left"
        table.add_column(each.heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for index, row in enumerate(rows):
        table.add_row(*(cells[each.heading][index] for each in shown), style=style(row))
    return table


def _has_value(cells: Sequence[Cell]) -> bool:
    return any(str(each) not in ("", "-") for each in cells)


def _width(heading: str, cells: Sequence[Cell]) -> int:
    return max(Text(heading).cell_len, *(_text(each).cell_len for each in cells), 0)


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)
