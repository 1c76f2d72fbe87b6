"""Rotary frequencies of the supported scalings, as a table of cosines and sines by position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.engine.checkpoint_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] FP32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, between blended."""
    wavelengths = 2 * math.pi / frequencies
    original = rope.original_max_position_embeddings
    blend = (original / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(
        wavelengths > original / rope.low_freq_factor, frequencies / rope.factor, blended
    )
    return torch.where(wavelengths < original / rope.high_freq_factor, frequencies, stretched)


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [num_positions, head_dim / 2] FP32 each."""
    angles = torch.outer(torch.arange(num_positions).float(), inverse_frequencies(rope, head_dim))
    return angles.cos(), angles.sin()
