"""A rank's part of the tensors of a quantized weight."""

from __future__ import annotations

from shared.engine.model_config.formats import FP8_BLOCK, Int4, WeightFormat
from shared.engine.parallel.cuts import Cut, Range
from shared.errors import CheckpointError

_CODES = 8  # codes of four bits in an int32


def quantized_cut(name: str, form: WeightFormat, cut: Cut) -> Cut:
    """Returns the part of tensor `name` that belongs to a part of its weight [N, K].

    Raises CheckpointError if the cut is not at borders of groups or blocks.
    """
    row_unit, column_unit = _units(name.rpartition(".")[2], form)
    rows = None if cut.rows is None else tuple(_scaled(name, r, row_unit, "row") for r in cut.rows)
    if cut.columns is None or column_unit is None:
        return Cut(rows=rows)
    _check_group(name, form, cut.columns)
    return Cut(rows=rows, columns=_scaled(name, cut.columns, column_unit, "column"))


def _units(kind: str, form: WeightFormat) -> tuple[int, int | None]:
    """Returns the rows and columns of the weight to one of the tensor; None: the tensor
    has one column.
    """
    if not isinstance(form, Int4):
        return (FP8_BLOCK, FP8_BLOCK) if kind == "weight_scale_inv" else (1, 1)
    if kind == "weight_packed":
        return 1, _CODES
    return _CODES if kind == "weight_zero_point" else 1, form.group or None


def _check_group(name: str, form: WeightFormat, columns: Range) -> None:
    """Codes are cut where scales are, so that every tensor names the same reason."""
    unit = form.group if isinstance(form, Int4) else FP8_BLOCK
    if unit:
        _scaled(name, columns, unit, "column")


def _scaled(name: str, given: Range, unit: int, what: str) -> Range:
    """Returns the cut in units. The last unit of a weight may be partial."""
    first, end = given
    if first % unit:
        raise CheckpointError(
            f"tensor {name}: ranks cut it at {what} {first}, inside of {unit} {what}s that share a "
            "scale or a word: use fewer ranks"
        )
    return first // unit, -(-end // unit)
