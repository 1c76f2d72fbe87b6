"""What a checkpoint's files hold, checked against the model that the config describes. No torch.

A linear layer's weight [N, K] may be stored quantised, as several tensors:

    weight_packed [N, K / codes per INT32], weight_scale [N, groups], weight_shape [2]
    weight (FP8) with weight_scale or weight_scale_inv: of rows, or of blocks of 128 x 128
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

from shared.engine.checkpoint_form import StackedPart, model_names, stacked_parts
from shared.engine.checkpoint_plan.headers import StoredTensor, stored_files
from shared.engine.checkpoint_plan.model_tensors import model_tensors
from shared.engine.model_config import ModelConfig
from shared.engine.models.weight_cuts import WeightCuts
from shared.engine.parallel.planning.rank_part import RankPart
from shared.errors import CheckpointError

FLOATS, CODES = ("BF16", "F16", "F32"), ("F8_E4M3",)
SCALES = ("weight_scale", "weight_scale_inv")
HARMLESS_SUFFIXES = ("rotary_emb.inv_freq",)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class _Kind(NamedTuple):
    """Quantised weights of one layer with equal shapes: `weight` names one of them."""

    weight: str
    shape: tuple[int, ...]


class StoredWeights:
    """Bytes and number of a checkpoint's tensors. `quantised`: bytes of the quantised weights."""

    def __init__(self) -> None:
        self.num_files = 0
        self.num_tensors = 0
        self.num_bytes = 0
        self.quantised: Counter[_Kind] = Counter()
        self._num_weights: Counter[_Kind] = Counter()

    def counted(
        self, files: Iterable[list[StoredTensor]], config: ModelConfig
    ) -> Iterator[tuple[StoredTensor, str]]:
        """Tensors that the model uses, with its names for them."""
        for tensors in files:
            self.num_files += 1
            self.num_tensors += len(tensors)
            self.num_bytes += sum(tensor.num_bytes for tensor in tensors)
            by_name = {tensor.name: tensor for tensor in tensors}
            for given, name in model_names(by_name, config.checkpoint):
                is_copy = name == "lm_head.weight" and config.has_tied_embeddings
                parts = stacked_parts(name, config.checkpoint.experts)
                for part, place in parts.items():
                    yield _part_of(by_name[given], place), part
                if not parts and not is_copy:
                    yield by_name[given], name

    def add_quantised(self, weight: str, shape: tuple[int, ...], num_bytes: int) -> None:
        """A tensor of the weight."""
        self.quantised[_kind(weight, shape)] += num_bytes

    def count_quantised(self, weight: str, shape: tuple[int, ...]) -> None:
        """The weight itself, once."""
        self._num_weights[_kind(weight, shape)] += 1

    def saved_bytes(self, config: ModelConfig, part: RankPart, item_bytes: int) -> int:
        """By which a rank's part is smaller than if no weight of it were quantised."""
        cuts, saved = WeightCuts(config, part), 0
        for kind, count in self._num_weights.items():
            layer = _LAYER.match(kind.weight)
            if layer is not None and int(layer[1]) not in part.layers:
                continue
            whole = prod(kind.shape)
            if _EXPERT.search(kind.weight):  # one dimension is the experts' columns
                inner = min(kind.shape, key=lambda size: size == config.hidden_size)
                share = len(part.columns_of(inner)) / inner
            else:
                share = prod(cuts.of(kind.weight).shape(kind.shape)) / whole
            saved += round(share * (count * whole * item_bytes - self.quantised[kind]))
        return saved


def _part_of(tensor: StoredTensor, place: StackedPart) -> StoredTensor:
    """One expert's weight of a tensor of all experts."""
    shape = place.shape(tensor.shape)
    if place.end is not None and len(tensor.shape) == 3 and tensor.shape[2] < place.end:
        shape = tensor.shape  # which is not the weight's
    return tensor._replace(shape=shape)


def _kind(weight: str, shape: tuple[int, ...]) -> _Kind:
    return _Kind(_EXPERT.sub(".experts.0.", weight), shape)


def read_stored(model_dir: Path, config: ModelConfig) -> StoredWeights:
    """Raises CheckpointError for a tensor that is missing, not part of the model, or of another
    shape or dtype than the model's.
    """
    expected, found = model_tensors(config), StoredWeights()
    missing, with_scales = set(expected), set[str]()
    for tensor, name in found.counted(stored_files(model_dir), config):
        if name.endswith(HARMLESS_SUFFIXES):
            continue
        stem, _, part = name.rpartition(".")
        weight = f"{stem}.weight" if part.startswith("weight_") else name
        shape = expected.get(weight)
        if shape is None:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name} is not part of the model")
        _check(tensor, part, shape)
        if part in SCALES:
            with_scales.add(weight)
        if part.startswith("weight_") or tensor.dtype in CODES:
            found.add_quantised(weight, shape, tensor.num_bytes)
        if part in (*SCALES, "weight_shape"):
            continue
        if weight not in missing:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name}: {weight} is there twice")
        missing.remove(weight)
        if part == "weight_packed" or tensor.dtype in CODES:
            found.count_quantised(weight, shape)
            missing.add(f"{stem}.weight_scale")
    missing -= {f"{name}_scale" for name in with_scales}
    _expect_all(model_dir, missing)
    return found


def _check(tensor: StoredTensor, part: str, shape: tuple[int, ...]) -> None:
    where = f"{tensor.path}: tensor {tensor.name}"
    dtypes = {"weight_packed": ("I32",), "weight_shape": ("I32", "I64")}.get(part, FLOATS)
    if part == "weight" and len(shape) == 2:
        dtypes = FLOATS + CODES
    if tensor.dtype not in dtypes:
        raise CheckpointError(f"{where} is {tensor.dtype}, not {', '.join(dtypes)}")
    if not _fits(tensor.shape, part, shape):
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}, the config requires "
            f"{'a part of ' if part.startswith('weight_') else ''}{list(shape)}"
        )


def _fits(stored: tuple[int, ...], part: str, shape: tuple[int, ...]) -> bool:
    match part:
        case "weight_shape":
            return stored == (2,)
        case "weight_packed":  # 8 or 4 codes of 4 or 8 bits in an INT32
            return stored in [(shape[0], shape[1] // codes) for codes in (4, 8)]
        case "weight_scale_inv":
            return stored == (-(-shape[0] // 128), -(-shape[1] // 128))
        case "weight_scale":
            blocks = -(-shape[0] // 128), -(-shape[1] // 128)
            is_of_rows = len(stored) == 2 and stored[0] == shape[0] and not shape[1] % stored[1]
            return is_of_rows or stored in (blocks, (1,), (), (shape[0],))
    return stored == shape


def _expect_all(model_dir: Path, missing: set[str]) -> None:
    if missing:
        first = min(missing)
        others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{model_dir}: tensor {first} is missing{others}")
