"""What a checkpoint's files hold, checked against the model that the config describes. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shared.engine.checkpoint_form import StackedPart, model_names, stacked_parts
from shared.engine.checkpoint_plan.expected_tensors import Expected, expected_tensors
from shared.engine.checkpoint_plan.headers import StoredTensor, stored_files
from shared.engine.model_config import ModelConfig
from shared.engine.models.weight_cuts import WeightCuts
from shared.engine.parallel.planning.rank_part import RankPart
from shared.errors import CheckpointError

HARMLESS_SUFFIXES = ("rotary_emb.inv_freq",)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class _Kind(NamedTuple):
    """Quantised weights of one layer with equal shapes: `weight` names one of them."""

    weight: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, weight: str, shape: tuple[int, ...]) -> _Kind:
        return cls(_EXPERT.sub(".experts.0.", weight), shape)


@dataclass
class StoredWeights:
    """Bytes and number of a checkpoint's tensors; by kind, those of quantised weights as stored,
    and how many values they have.
    """

    num_files: int = 0
    num_tensors: int = 0
    num_bytes: int = 0
    quantised_bytes: Counter[_Kind] = field(default_factory=Counter)
    quantised_values: Counter[_Kind] = field(default_factory=Counter)

    def used(
        self, files: Iterable[list[StoredTensor]], config: ModelConfig
    ) -> Iterator[tuple[StoredTensor, str]]:
        """Counts tensors. Yields those that the model uses, with its names for them."""
        for tensors in files:
            self.num_files += 1
            self.num_tensors += len(tensors)
            self.num_bytes += sum(tensor.num_bytes for tensor in tensors)
            by_name = {tensor.name: tensor for tensor in tensors}
            for given, name in model_names(by_name, config.checkpoint):
                parts = stacked_parts(name, config.checkpoint.experts)
                for part, place in parts.items():
                    yield _part_of(by_name[given], place), part
                if not parts and not name.endswith(HARMLESS_SUFFIXES):
                    yield by_name[given], name

    def saved_bytes(self, config: ModelConfig, part: RankPart, item_bytes: int) -> int:
        """By which a rank's part is smaller than if no weight of it were quantised."""
        saved, dense = (
            0.0,
            replace(config, layers=tuple(replace(layer, formats=None) for layer in config.layers)),
        )
        cuts = WeightCuts(dense, part)
        for kind, num_values in self.quantised_values.items():
            layer = _LAYER.match(kind.weight)
            if layer is None or int(layer[1]) in part.layers:
                share = _share(kind, cuts, part, config)
                saved += share * (num_values * item_bytes - self.quantised_bytes[kind])
        return round(saved)


def _share(kind: _Kind, cuts: WeightCuts, part: RankPart, config: ModelConfig) -> float:
    """Of the kind's values, that belong to the rank."""
    share = prod(cuts.of(kind.weight).shape(kind.shape)) / prod(kind.shape)
    if _EXPERT.search(kind.weight) is None or part.experts is None or config.moe is None:
        return share
    first, end = part.experts.experts
    return share * (end - first) / config.moe.num_experts


def _part_of(tensor: StoredTensor, place: StackedPart) -> StoredTensor:
    """One expert's weight of a tensor of all experts."""
    shape = place.shape(tensor.shape)
    if place.end is not None and len(tensor.shape) == 3 and tensor.shape[2] < place.end:
        shape = tensor.shape  # which is not the weight's
    return tensor._replace(shape=shape)


def read_stored(model_dir: Path, config: ModelConfig) -> StoredWeights:
    """Raises CheckpointError for a tensor that is missing, not part of the model, or of another
    shape or dtype than the model's.
    """
    expected, found = expected_tensors(config), StoredWeights()
    missing = {name for name, each in expected.items() if not each.is_optional}
    sources: dict[str, str] = {}
    for tensor, name in found.used(stored_files(model_dir), config):
        each = expected.get(name)
        if each is None:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name} is not part of the model")
        other = sources.setdefault(name, tensor.name)
        if other != tensor.name:
            raise CheckpointError(
                f"{tensor.path}: tensors {other} and {tensor.name} are both {name}"
            )
        _check(tensor, each)
        missing.discard(name)
        if each.weight is not None:
            found.quantised_bytes[_Kind.of(*each.weight)] += tensor.num_bytes
    _expect_all(model_dir, missing)
    for weight, shape in {each.weight for each in expected.values() if each.weight is not None}:
        found.quantised_values[_Kind.of(weight, shape)] += prod(shape)
    return found


def _check(tensor: StoredTensor, expected: Expected) -> None:
    where = f"{tensor.path}: tensor {tensor.name}"
    if tensor.dtype not in expected.dtypes:
        raise CheckpointError(f"{where} is {tensor.dtype}, not {', '.join(expected.dtypes)}")
    if tensor.shape != expected.shape:
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}, the config requires {list(expected.shape)}"
        )


def _expect_all(model_dir: Path, missing: set[str]) -> None:
    if missing:
        others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{model_dir}: tensor {min(missing)} is missing{others}")
