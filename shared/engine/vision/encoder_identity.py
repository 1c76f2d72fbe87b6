"""What the vectors of an image encoder depend on, for a process that has no model beside it."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.config import EncodeConfig
from shared.engine.executors.load import resolve_device
from shared.engine.executors.loading.device_numerics import device_numerics
from shared.engine.executors.loading.mode_choice import resolve_mode
from shared.engine.executors.loading.model_loading import empty_model, open_weights, resolve_dtype
from shared.engine.models.checkpoint_config import read_config
from shared.numerics import Numerics


def encoder_numerics(config: EncodeConfig) -> Numerics:
    """Returns the numerics that a worker with these options has. Raises ConfigError."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    return device_numerics(device, dtype, resolve_mode(config.mode, device), kv_dtype=dtype)


def checkpoint_revision(model_dir: Path, dtype: str, load_format: str) -> str:
    """Returns the revision that a worker of this checkpoint announces: the digest of all weights,
    which are read, but not loaded. Raises CheckpointError.
    """
    config, nowhere = read_config(model_dir), torch.device("meta")
    model = empty_model(model_dir, config, dtype, nowhere, num_positions=1)
    with open_weights(model_dir, config, model, load_format) as weights:
        return weights.revision()
