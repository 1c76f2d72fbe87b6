"""A checkpoint's tensors by the model's names, with rows in the model's order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shared.engine.model_config.checkpoint_form import (
    FIXED_KINDS,
    CheckpointForm,
    PairedRows,
    StackedPart,
    model_names,
    stacked_parts,
)
from shared.engine.model_config.formats import FP8_BLOCK
from shared.engine.parallel.cuts import WHOLE, Cut
from shared.engine.weights.stacked_experts import read_stacked
from shared.engine.weights.weight_source import Content, TensorInfo, WeightSource
from shared.errors import CheckpointError


class FormedTensors:
    """A `WeightSource`. Shapes and contents are the checkpoint's, whatever the order of rows.

    Experts that the checkpoint has as one tensor have the content of all. `dropped` are names of
    the checkpoint that the model does not use.
    """

    def __init__(self, tensors: WeightSource, form: CheckpointForm) -> None:
        """Raises CheckpointError if two tensors have one name."""
        self._tensors = tensors
        self._paired = [(re.compile(pattern), rows) for pattern, rows in form.paired]
        self._experts: dict[str, StackedPart] = {}
        self._source: dict[str, str] = {}
        names = tensors.names()
        found = model_names(names, form)
        self.dropped = sorted(set(names) - {given for given, _ in found})
        for given, name in found:
            parts = stacked_parts(name, form.experts)
            self._experts |= parts
            for part in parts or (name,):
                other = self._source.setdefault(part, given)
                if other != given:
                    raise CheckpointError(
                        f"{tensors.path(given)}: tensors {other} and {given} are both {part}"
                    )

    def names(self) -> list[str]:
        return sorted(self._source)

    def files(self) -> list[Path]:
        return self._tensors.files()

    def path(self, name: str) -> Path:
        return self._tensors.path(self._source[name])

    def info(self, name: str) -> TensorInfo:
        dtype, shape = self._tensors.info(self._source[name])
        part = self._experts.get(name)
        return TensorInfo(dtype, shape if part is None else part.shape(shape))

    def content(self, name: str) -> Content:
        return self._tensors.content(self._source[name])

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        """Raises ValueError for a cut through a head of paired rows."""
        if name in self._experts:
            read_stacked(self._experts[name], self._tensors, self._source[name], cut, out)
            return
        rows = self._paired_rows(name)
        if rows is None:
            self._tensors.read_into(self._source[name], cut, out)
            return
        _check_heads(name, cut, rows.head)
        paired = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        self._tensors.read_into(self._source[name], cut, paired)
        order = halves(len(out), rows).to(out.device)
        if out.dtype == torch.float8_e4m3fn:  # has no index_select
            out, paired = out.view(torch.uint8), paired.view(torch.uint8)
        out.copy_(paired.index_select(0, order))

    def row_cuts(self, name: str) -> Sequence[Cut]:
        if name in self._experts or self._paired_rows(name) is not None:
            return (WHOLE,)
        return self._tensors.row_cuts(self._source[name])

    def _paired_rows(self, name: str) -> PairedRows | None:
        """Returns the pairs of a tensor whose rows are those of its layer. Raises CheckpointError
        where scales or zeros of a quantized weight cannot follow its rows.
        """
        layer, _, kind = name.rpartition(".")
        is_part = kind.startswith("weight_") or kind in FIXED_KINDS
        plain = f"{layer}.weight" if is_part else name
        rows = next((each for pattern, each in self._paired if pattern.fullmatch(plain)), None)
        if rows is None or kind in ("weight_shape", "weight_g_idx", "g_idx"):
            return None
        if kind in FIXED_KINDS:
            raise CheckpointError(
                f"{self.path(name)}: tensor {name}: {FIXED_KINDS[kind]} of a layer with rotary "
                "pairs are not supported: leave these layers dense, or take a format that "
                "`hearth models --supported` lists for this architecture"
            )
        if kind in ("weight_scale", "weight_scale_inv") and set(self.info(name).shape) <= {1}:
            return None
        if kind in ("weight_scale", "weight_scale_inv") and self._is_of_blocks(name, plain):
            self._check_blocks(name, rows, self.info(plain).shape[0])
            return None
        return rows

    def _is_of_blocks(self, scale: str, weight: str) -> bool:
        """Whether rows share a scale: packed weights have other names, and a scale for each row."""
        return weight in self._source and self.info(scale).shape[0] != self.info(weight).shape[0]

    def _check_blocks(self, name: str, rows: PairedRows, num_rows: int) -> None:
        """The pairs of each head must be in one block of rows that share a scale."""
        for first in range(rows.first, num_rows, rows.head):
            last = first + rows.dim - 1
            if first // FP8_BLOCK != last // FP8_BLOCK:
                raise CheckpointError(
                    f"{self.path(name)}: tensor {name}: rotary rows {first} to {last} of one head "
                    f"are in two blocks of {FP8_BLOCK} rows"
                )


def halves(num_rows: int, paired: PairedRows) -> Tensor:
    """[num_rows] the checkpoint's row of each of the model's rows. Raises ValueError."""
    if num_rows % paired.head:
        raise ValueError(f"{num_rows} rows are no heads of {paired.head} rows")
    rows = torch.arange(num_rows).view(-1, paired.head)
    rotated = rows[:, paired.first : paired.first + paired.dim]
    rotated.copy_(torch.cat((rotated[:, ::2], rotated[:, 1::2]), dim=1))
    return rows.view(-1)


def _check_heads(name: str, cut: Cut, head: int) -> None:
    if any(first % head or end % head for first, end in cut.rows or ()):
        raise ValueError(f"tensor {name}: rows {cut.rows} cut a head of {head} rows")
