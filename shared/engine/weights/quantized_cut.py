"""A rank's part of the tensors of a quantized weight."""

from __future__ import annotations

from shared.engine.model_config.formats import ORDERS, Units, WeightFormat, units_of
from shared.engine.parallel.cuts import Cut, Range
from shared.errors import CheckpointError


def quantized_cut(name: str, form: WeightFormat, cut: Cut) -> Cut:
    """Returns the part of tensor `name` that belongs to a part of its weight [N, K].

    Raises CheckpointError if the cut is not at borders of groups, blocks or words.
    """
    all_units = units_of(form)
    units = all_units.get(name.rpartition(".")[2], Units(""))
    rows = columns = None
    if cut.rows is not None and units.rows is not None:
        unit = units.rows
        rows = tuple(_scaled(name, each, unit, "row") for each in cut.rows)
    if cut.columns is not None:
        if not all_units.keys().isdisjoint(ORDERS):
            raise CheckpointError(
                f"tensor {name}: ranks cut its columns, which have an order (desc_act, actorder): "
                "use one rank, or a checkpoint without an order (`hearth models --supported` lists "
                "the formats)"
            )
        # Codes are cut where scales are, so that every tensor names the same reason.
        _scaled(name, cut.columns, max(each.columns or 1 for each in all_units.values()), "column")
        if units.columns is not None:
            columns = _scaled(name, cut.columns, units.columns, "column")
    return _transposed(rows, columns) if units.by_columns else Cut(rows=rows, columns=columns)


def _transposed(rows: tuple[Range, ...] | None, columns: Range | None) -> Cut:
    """Returns the cut of a tensor whose first dimension is that of columns."""
    first = None if columns is None else (columns,)
    if rows is not None and len(rows) > 1:
        raise CheckpointError(f"ranks cut rows {list(rows)} of a weight that is stored by columns")
    return Cut(rows=first, columns=None if rows is None else rows[0])


def _scaled(name: str, given: Range, unit: int, what: str) -> Range:
    """Returns the cut in units. The last unit of a weight may be partial."""
    first, end = given
    if first % unit:
        raise CheckpointError(
            f"tensor {name}: ranks cut it at {what} {first}, inside of {unit} {what}s that share a "
            "scale or a word: use fewer ranks"
        )
    return first // unit, -(-end // unit)
