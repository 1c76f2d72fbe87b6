"""Reads the files of a checkpoint that say how it takes images."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from shared.errors import ConfigError
from shared.tokenizer.checkpoint_file import exists, read_checkpoint_file
from shared.transport.wire_errors import UNREADABLE

CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
PROCESSORS = "processor_config.json"  # of transformers 5, with those of texts and images
HALF = (0.5, 0.5, 0.5)  # the mean and the deviation with which workers normalise
DIGEST_BYTES = 16
Kind = TypeVar("Kind")


class FoundFile(NamedTuple):
    """`data` is a JSON document: the file, or the part of it that is about images."""

    path: Path
    data: bytes


class _Processors(msgspec.Struct, frozen=True):
    image_processor: msgspec.Raw = msgspec.Raw(b"null")


def model_file(model_dir: Path) -> FoundFile:
    """Raises ConfigError."""
    return _found(model_dir / CONFIG) or FoundFile(model_dir / CONFIG, b"{}")


def processor_file(model_dir: Path) -> FoundFile | None:
    """Returns the image processor's fields, where transformers looks for them first; None: there
    are none. Raises ConfigError.
    """
    both = _found(model_dir / PROCESSORS)
    part = b"null" if both is None else bytes(decoded(both, _Processors).image_processor)
    if part == b"null":
        return _found(model_dir / PROCESSOR)
    return FoundFile(model_dir / PROCESSORS, part)


def _found(path: Path) -> FoundFile | None:
    try:
        return FoundFile(path, read_checkpoint_file(path)) if exists(path) else None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def decoded(file: FoundFile, kind: type[Kind]) -> Kind:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(file.data, type=kind)
    except UNREADABLE as error:
        raise ConfigError(f"cannot read {file.path}: {error}") from error


def digest_of(processor: bytes, sizes: tuple[Any, ...]) -> bytes:
    """Returns the identity of a processor: of its file, and of sizes that others decide."""
    return blake2b(processor + repr(sizes).encode(), digest_size=DIGEST_BYTES).digest()


class Steps(msgspec.Struct, frozen=True):
    """What transformers' processors do with every image, by their fields and defaults."""

    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    do_convert_rgb: bool = True
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = HALF
    image_std: tuple[float, ...] = HALF


def check_steps(steps: Steps, path: Path) -> None:
    """Raises ConfigError for a processor that transforms images in another way."""
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not getattr(steps, name):
            raise ConfigError(f"{path}: {name} must be true")
    if abs(steps.rescale_factor * 255 - 1) > 1e-6:
        raise ConfigError(f"{path}: rescale_factor must be 1/255")
    if (steps.image_mean, steps.image_std) != (HALF, HALF):
        raise ConfigError(f"{path}: image_mean and image_std must be {list(HALF)}")


def check_resample(resample: int, expected: int, name: str, path: Path) -> None:
    if resample != expected:
        raise ConfigError(f"{path}: resample must be {expected}, {name}")
