"""Reads `config.json` and `generation_config.json` of a checkpoint folder.

Each family's file interprets its config. transformers is not imported, because that takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import structlog

from shared.engine.model_config.formats import Mxfp4
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.quantization import LayerFormats, Quantization
from shared.engine.model_config.quantization_config import (
    FIELD,
    CheckpointFormats,
    checkpoint_formats,
)
from shared.engine.model_config.quantization_fields import refused
from shared.engine.models import FAMILIES, supported_architecture
from shared.engine.planning.stored.stored_head import with_stored_head
from shared.engine.planning.stored.stored_scales import with_stored_scales
from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import exists, read_checkpoint_json
from shared.tokenizer.checkpoint_folder import check_folder
from shared.tokenizer.end_tokens import end_token_ids

log = structlog.get_logger(__name__)

MAX_SHOWN = 8  # of the tokens that a log line lists
EXPORT = "hf_quant_config.json"  # ModelOpt's, for a config.json that says nothing of it


class _ConfigHead(msgspec.Struct):
    architectures: list[str] | None = None
    model_type: str | None = None


def read_config(model_dir: Path) -> ModelConfig:
    """Returns the model of a checkpoint folder, with or without weights in it.

    Raises CheckpointError with one line for a missing, unreadable or unsupported config.
    """
    path = model_dir / "config.json"
    if not exists(path):
        check_folder(model_dir, needs_weights=False)
    head, given = (
        read_checkpoint_json(path, _ConfigHead),
        read_checkpoint_json(path, dict[str, Any]),
    )
    written = head.architectures[0] if head.architectures else ""
    try:
        architecture = supported_architecture(written, head.model_type or "")
        formats = _formats(model_dir, given)
        weights = formats.weights
        if weights is not None:
            weights = with_stored_scales(weights, model_dir)
        config = with_formats(FAMILIES[architecture](given), weights)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.message}") from None
    except ArithmeticError as error:
        raise CheckpointError(f"{path}: numbers out of range: {error}") from None
    ends = end_token_ids(model_dir)
    known = tuple(each for each in ends if 0 <= each < config.vocab_size)
    if len(known) < len(ends):
        left_out = sorted({*ends} - {*known})[:MAX_SHOWN]
        log.warning("end_tokens_left_out", path=str(path), token_ids=left_out)
    config = msgspec.structs.replace(
        config,
        eos_token_ids=known,
        architecture=architecture,
        declares_fp8_kv=formats.has_fp8_kv,
    )
    return with_stored_head(config, model_dir)


def _formats(model_dir: Path, given: dict[str, Any]) -> CheckpointFormats:
    """Raises CheckpointError."""
    export = model_dir / EXPORT
    if given.get(FIELD) or not exists(export):
        return checkpoint_formats(given)
    try:
        written = {"quant_method": "modelopt", **read_checkpoint_json(export, dict[str, Any])}
        return checkpoint_formats({**given, FIELD: written})
    except CheckpointError as error:
        raise CheckpointError(f"{EXPORT}: {error.message}") from None


def with_formats(config: ModelConfig, quantization: Quantization | None) -> ModelConfig:
    """Returns the config of a checkpoint that is quantized like this. Raises CheckpointError."""
    if quantization is None:
        return config
    is_mxfp4 = any(isinstance(group.form, Mxfp4) for group in quantization.groups)
    if is_mxfp4 and not config.checkpoint.has_mxfp4:
        raise refused("mxfp4 is not supported but for the experts of gpt-oss")
    quantization = msgspec.structs.replace(quantization, renames=config.checkpoint.renames)
    layers = tuple(
        msgspec.structs.replace(
            layer, formats=LayerFormats(place=f"model.layers.{index}", quantization=quantization)
        )
        for index, layer in enumerate(config.layers)
    )
    return msgspec.structs.replace(config, layers=layers)
