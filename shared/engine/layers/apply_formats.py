"""Gives the linear layers of a decoder layer the formats of a quantised checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from shared.engine.layers.linear import Linear
from shared.engine.quantisation.formats import WeightFormat
from shared.engine.quantisation.quantisation import LayerFormats
from shared.errors import CheckpointError


def apply_formats(layer: nn.Module, formats: LayerFormats | None) -> None:
    """`layer` is unset, and has no quantised weights yet. Raises CheckpointError for layers that
    are one product here and have different formats in the checkpoint, and for groups that do not
    fit.
    """
    if formats is None:
        return
    for linear, rows in _linears(layer):
        found = {path: formats.of(path) for path in rows}
        form = next(iter(found.values()))
        if any(each != form for each in found.values()):
            described = ", ".join(f"{path} {each or 'dense'}" for path, each in found.items())
            raise CheckpointError(
                f"{formats.place}: {described}: they are one product and need one format"
            )
        if form is not None:
            _quantise(linear, form, rows, formats.place)


def _quantise(linear: Linear, form: WeightFormat, rows: Mapping[str, int], place: str) -> None:
    try:
        linear.quantise(form, list(rows.values()))
    except CheckpointError as error:
        raise CheckpointError(f"{place}.{next(iter(rows))}: {error.message}") from None


def _linears(layer: nn.Module) -> Iterator[tuple[Linear, dict[str, int]]]:
    """Each linear layer with the checkpoint's layers that it consists of: path -> output rows."""
    for path, parent in layer.named_modules():
        fused: Mapping[str, Mapping[str, int]] = getattr(parent, "parts", {})
        for name, child in parent.named_children():
            if isinstance(child, Linear):
                parts = fused.get(name, {name: child.parameter.shape[0]})
                at = f"{path}." if path else ""
                yield child, {f"{at}{part}": rows for part, rows in parts.items()}
