"""Tells checkpoints apart by names, shapes and first values of all tensors."""

from __future__ import annotations

import torch
import xxhash

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.decoder import Decoder
from shared.engine.parallel.cuts import WHOLE, Cut
from shared.engine.weights.weight_source import WeightSource

NUM_SAMPLED_ROWS = 1


def fingerprint(tensors: WeightSource, described: bytes) -> str:
    """Returns a digest of the config `described` and of samples of all tensors. Raises
    CheckpointError.
    """
    digest = xxhash.xxh3_128(described)
    for name in sorted(tensors.names()):
        dtype, shape = tensors.info(name)
        digest.update(f"{name} {dtype} {shape}".encode())
        cut = Cut(rows=((0, min(NUM_SAMPLED_ROWS, shape[0])),)) if shape else WHOLE
        sample = torch.empty(cut.shape(shape), dtype=torch.float32)
        tensors.read_into(name, cut, sample)
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def model_on_meta(config: ModelConfig, dtype: str) -> Decoder:
    """Returns the whole model without memory: its tensors have names and shapes."""
    with torch.device("meta"):
        return Decoder(config, dtype=getattr(torch, dtype), num_positions=1)
