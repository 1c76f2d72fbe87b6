"""Gives the linear layers of a decoder layer the formats of a quantized checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import nn

from shared.engine.layers.latent_attention import LatentExpansion
from shared.engine.layers.linear import Linear
from shared.engine.layers.moe import Experts
from shared.engine.model_config.formats import WeightFormat
from shared.engine.model_config.quantization import LayerFormats
from shared.errors import CheckpointError


class Quantizable(Protocol):
    def quantize(self, form: WeightFormat, rows: Sequence[int], width: int | None = None) -> None:
        """Replaces the unset weight by one of this format.

        `rows` are those of the checkpoint's layers, `width` their columns, by default the weight's.
        Raises CheckpointError if groups of columns do not fill a row.
        """


def apply_formats(layer: nn.Module, formats: LayerFormats | None) -> None:
    """Gives a layer the formats of its quantized weights, which it must not have yet; it is unset.
    Raises CheckpointError for linear layers of one GEMM that have different formats in the
    checkpoint, and for groups that do not fit.
    """
    if formats is None:
        return
    for linear, rows, width in _linears(layer):
        found = {path: formats.of(path) for path in rows}
        path, form = next(iter(found.items()))
        other = next((each for each in found if found[each] != form), None)
        if other is not None:
            described = f"{path} {form or 'dense'}, {other} {found[other] or 'dense'}"
            raise CheckpointError(
                f"{formats.place}: {described}: they are one product and need one format"
            )
        if form is None:
            continue
        try:
            linear.quantize(form, list(rows.values()), width)
        except CheckpointError as error:
            raise CheckpointError(f"{formats.place}.{path}: {error.message}") from None


def _linears(layer: nn.Module) -> Iterator[tuple[Quantizable, dict[str, int], int | None]]:
    """Yields each GEMM with the checkpoint's linear layers that it consists of: path -> output
    rows; and their columns, None: the GEMM's.
    """
    for path, parent in layer.named_modules():
        if isinstance(parent, Experts):
            for product, experts, width in parent.linears():
                yield product, {f"{path}.{part}": rows for part, rows in experts.items()}, width
            continue
        fused: Mapping[str, Mapping[str, int]] = getattr(parent, "parts", {})
        for name, child in parent.named_children():
            if isinstance(child, Linear | LatentExpansion):
                parts = fused.get(name, {name: child.num_rows})
                at = f"{path}." if path else ""
                yield child, {f"{at}{part}": rows for part, rows in parts.items()}, None
