"""Checks a checkpoint's files against the model that the config describes. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.engine.model_config.checkpoint_form import (
    StackedPart,
    is_quantized_part,
    model_names,
    stacked_parts,
)
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.vision_config import VisionConfig
from shared.engine.planning.expected_tensors import Expected, expected_tensors
from shared.engine.planning.headers import HeaderTensor, stored_files
from shared.engine.planning.vision_tensors import vision_tensors
from shared.errors import CheckpointError


@dataclass
class StoredWeights:
    """Bytes and number of a checkpoint's tensors."""

    num_files: int = 0
    num_tensors: int = 0
    num_bytes: int = 0

    def used(
        self, files: Iterable[list[HeaderTensor]], config: ModelConfig
    ) -> Iterator[tuple[HeaderTensor, str]]:
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
                if not parts:
                    yield by_name[given], name


def _part_of(tensor: HeaderTensor, place: StackedPart) -> HeaderTensor:
    """Returns one expert's weight of a tensor of all experts."""
    return tensor._replace(shape=place.shape(tensor.shape))


def read_stored(model_dir: Path, config: ModelConfig) -> StoredWeights:
    """Raises CheckpointError for a tensor that is missing, or of another shape or dtype than the
    model's, and for a quantized layer of a dense model. Other tensors are not used.
    """
    expected, found = expected_tensors(config), StoredWeights()
    missing = {name for name, each in expected.items() if not each.is_optional}
    sources: dict[str, str] = {}
    files = list(stored_files(model_dir))
    for tensor, name in found.used(files, config):
        each = expected.get(name)
        if each is None:
            if is_quantized_part(name, expected):
                raise CheckpointError(
                    f"{tensor.path}: tensor {tensor.name} is not part of the model"
                )
            continue
        other = sources.setdefault(name, tensor.name)
        if other != tensor.name:
            raise CheckpointError(
                f"{tensor.path}: tensors {other} and {tensor.name} are both {name}"
            )
        _check(tensor, each)
        missing.discard(name)
    _expect_all(model_dir, missing)
    if config.vision is not None:
        _check_encoder(model_dir, files, config.vision)
    return found


def _check_encoder(
    model_dir: Path, files: Iterable[list[HeaderTensor]], config: VisionConfig
) -> None:
    """Raises CheckpointError for a tensor of the image encoder that is missing, or of another
    shape.
    """
    expected = {name: Expected(shape) for name, shape in vision_tensors(config).items()}
    by_name = {tensor.name: tensor for tensors in files for tensor in tensors}
    names = {name: given for given, name in model_names(by_name, config.form)}
    _expect_all(model_dir, expected.keys() - names.keys())
    for name, each in expected.items():
        _check(by_name[names[name]], each)


def _check(tensor: HeaderTensor, expected: Expected) -> None:
    where = f"{tensor.path}: tensor {tensor.name}"
    if tensor.dtype not in expected.dtypes:
        raise CheckpointError(f"{where} is {tensor.dtype}, not {', '.join(expected.dtypes)}")
    is_one = expected.shape == (1,) and set(tensor.shape) <= {1}  # of any number of dimensions
    if tensor.shape != expected.shape and not is_one:
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}, the config requires {list(expected.shape)}"
        )


def _expect_all(model_dir: Path, missing: Collection[str]) -> None:
    if missing:
        others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{model_dir}: tensor {min(missing)} is missing{others}")
