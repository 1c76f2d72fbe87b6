"""The weight of one expert, as a part of a checkpoint's tensor of all experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.checkpoint_form import StackedExperts
from shared.engine.parallel.cuts import Cut
from shared.engine.weights.weight_source import WeightSource

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


@dataclass(frozen=True, slots=True)
class StackedPart:
    """Columns [first, end) of expert `index` of a tensor [E, K, N], transposed."""

    index: int
    first: int
    end: int | None  # None: all from `first` on

    def shape(self, full: Sequence[int]) -> tuple[int, ...]:
        """[N, K]; the full shape if it has no experts in it."""
        if len(full) != 3 or self.index >= full[0]:
            return tuple(full)
        end = full[2] if self.end is None else self.end
        return end - self.first, full[1]

    def read_into(self, tensors: WeightSource, name: str, cut: Cut, out: Tensor) -> None:
        """`cut`: of the weight [N, K]. The expert's rows of its columns K are read."""
        full = tensors.info(name).shape
        shape = self.shape(full)
        low, high = cut.columns or (0, shape[1])
        expert = torch.empty((1, high - low, full[2]), dtype=out.dtype)
        tensors.read_into(name, Cut(((self.index, self.index + 1),), (low, high)), expert)
        weight = expert[0, :, self.first : self.first + shape[0]].T
        for (rows, *_), part in Cut(cut.rows).slices(shape):
            out[part].copy_(weight[rows])


def stacked_parts(name: str, experts: StackedExperts | None) -> dict[str, StackedPart]:
    """The weights that a tensor consists of, by the model's names; none if it is one itself."""
    if experts is None or not name.endswith((GATE_UP, DOWN)):
        return {}
    layer, inner = name.rpartition(".")[0], experts.inner
    is_down = name.endswith(DOWN)
    places = {"gate_proj": (0, inner), "up_proj": (inner, 2 * inner)}
    return {
        f"{layer}.{index}.{part}.weight": StackedPart(index, *place)
        for index in range(experts.num_experts)
        for part, place in ({"down_proj": (0, None)} if is_down else places).items()
    }
