"""A rank's parts of a checkpoint's tensors, as a source whose tensors are these parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from torch import Tensor

from shared.engine.models.weight_cuts import WeightCuts
from shared.engine.parallel.cuts import WHOLE, Cut
from shared.engine.weights.weight_source import Content, TensorInfo, WeightSource


class RankTensors:
    """A `WeightSource` of the tensors `names`; every cut of theirs is whole."""

    def __init__(self, tensors: WeightSource, cuts: WeightCuts, names: Collection[str]) -> None:
        self._tensors = tensors
        self._cuts = cuts
        self._names = names

    def names(self) -> list[str]:
        return [name for name in self._tensors.names() if name in self._names]

    def files(self) -> list[Path]:
        return self._tensors.files()

    def path(self, name: str) -> Path:
        return self._tensors.path(name)

    def info(self, name: str) -> TensorInfo:
        dtype, shape = self._tensors.info(name)
        return TensorInfo(dtype, self._cuts.of(name).shape(shape))

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        if not cut.is_whole:
            raise ValueError(f"tensor {name}: a rank's part is not cut again")
        self._tensors.read_into(name, self._cuts.of(name), out)

    def row_cuts(self, name: str) -> Sequence[Cut]:
        return (WHOLE,)

    def content(self, name: str) -> Content:
        return self._tensors.content(name)
