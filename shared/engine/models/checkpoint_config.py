"""Reads `config.json` and `generation_config.json` of a checkpoint folder.

Each family's file interprets its config. transformers is not imported, because that takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.engine.checkpoint_plan.stored_head import with_stored_head
from shared.engine.model_config import ModelConfig
from shared.engine.models import FAMILIES, supported_architecture
from shared.engine.quantisation.quantisation import LayerFormats, Quantisation
from shared.engine.quantisation.quantization_config import quantisation_of
from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import exists, read_checkpoint_file
from shared.transport.wire_errors import UNREADABLE

EosTokenId = int | list[int] | None
_T = TypeVar("_T")


class _Generation(msgspec.Struct):
    eos_token_id: EosTokenId = None


class _Head(_Generation):
    architectures: list[str] | None = None
    model_type: str | None = None
    text_config: _Generation | None = None


def read_config(model_dir: Path) -> ModelConfig:
    """The model of a checkpoint folder, with or without weights in it.

    Raises CheckpointError with one line for a missing, unreadable or unsupported config.
    """
    path = model_dir / "config.json"
    head, given = _read(path, _Head), _read(path, dict[str, Any])
    written = head.architectures[0] if head.architectures else ""
    try:
        architecture = supported_architecture(written, head.model_type or "")
        config = with_formats(FAMILIES[architecture](given), quantisation_of(given))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.message}") from None
    except ArithmeticError as error:
        raise CheckpointError(f"{path}: numbers out of range: {error}") from None
    eos = head.eos_token_id
    if eos is None and head.text_config is not None:
        eos = head.text_config.eos_token_id
    eos_token_ids = _eos_token_ids(model_dir, eos)
    if eos_token_ids is not None:
        for token_id in eos_token_ids:
            if not 0 <= token_id < config.vocab_size:
                raise CheckpointError(f"{path}: eos_token_id {token_id} is not in the vocabulary")
        config = msgspec.structs.replace(config, eos_token_ids=eos_token_ids)
    return with_stored_head(msgspec.structs.replace(config, architecture=architecture), model_dir)


def with_formats(config: ModelConfig, quantisation: Quantisation | None) -> ModelConfig:
    """The config of a checkpoint that is quantised like this."""
    if quantisation is None:
        return config
    layers = tuple(
        msgspec.structs.replace(
            layer, formats=LayerFormats(place=f"model.layers.{index}", quantisation=quantisation)
        )
        for index, layer in enumerate(config.layers)
    )
    return msgspec.structs.replace(config, layers=layers)


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(read_checkpoint_file(path), type=kind)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: {error}") from None


def _eos_token_ids(model_dir: Path, eos: EosTokenId) -> tuple[int, ...] | None:
    """generation_config.json has priority, as in transformers' generate; None if both lack it."""
    path = model_dir / "generation_config.json"
    if exists(path):
        generation = _read(path, _Generation)
        eos = generation.eos_token_id if generation.eos_token_id is not None else eos
    if eos is None:
        return None
    return (eos,) if isinstance(eos, int) else tuple(eos)
