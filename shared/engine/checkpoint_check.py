"""Checks a checkpoint before any process loads it: form, config, headers of its files. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shared.engine.codec.manifest import is_bundle
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.checkpoint_config import read_config
from shared.engine.planning.headers import has_files
from shared.engine.planning.stored_weights import StoredWeights, read_stored
from shared.tokenizer.checkpoint_folder import check_folder, check_tokenizer


class CheckedCheckpoint(NamedTuple):
    """`stored`: None if the folder has no weights, or a bundle's, which are checked as they
    load.
    """

    config: ModelConfig
    stored: StoredWeights | None


def check_checkpoint(model_dir: Path, *, needs_weights: bool) -> CheckedCheckpoint:
    """Raises CheckpointError with one line for what cannot be served. Weights that are there are
    checked in any case, a tokenizer only beside weights that are needed.
    """
    check_folder(model_dir, needs_weights=needs_weights)
    config = read_config(model_dir)
    has_weights = has_files(model_dir) and not is_bundle(model_dir)
    stored = read_stored(model_dir, config) if has_weights else None
    if needs_weights:
        check_tokenizer(model_dir)
    return CheckedCheckpoint(config, stored)
