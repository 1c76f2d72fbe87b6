"""Rotary frequencies of the supported scalings, as tables of cosines and sines by position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.model_config.model_config import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeConfig,
    YarnScaling,
)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """[rotary_dim / 2] FP32."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    wavelengths = rope.theta**exponents  # divided by 2π
    match rope.scaling:
        case LinearScaling():
            return 1.0 / wavelengths / rope.scaling.factor
        case Llama3Scaling():
            return _llama3(1.0 / wavelengths, rope.scaling)
        case YarnScaling():
            return _yarn(wavelengths, rope, rope.scaling)
        case LongScaling():
            return 1.0 / (torch.tensor(rope.scaling.factors) * wavelengths)
    return 1.0 / wavelengths


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Returns the frequencies of Llama 3.1: stretches long wavelengths by `factor`, not short ones;
    blends in between.

    With equal factors, as in Llama 4 Scout, nothing is in between.
    """
    wavelengths = 2 * math.pi / frequencies
    original, factor = scaling.original_context, scaling.factor
    if scaling.low_freq_factor == scaling.high_freq_factor:
        is_long = wavelengths > original / scaling.low_freq_factor
        return torch.where(is_long, frequencies / factor, frequencies)
    blend = (original / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(
        wavelengths > original / scaling.low_freq_factor, frequencies / factor, blended
    )
    return torch.where(wavelengths < original / scaling.high_freq_factor, frequencies, stretched)


def _yarn(wavelengths: Tensor, rope: RopeConfig, scaling: YarnScaling) -> Tensor:
    """Returns the frequencies of YaRN (Peng et al.): stretches pairs except those with many turns
    in the original context.

    Between `beta_fast` and `beta_slow` turns a linear ramp blends the two.
    """
    first = _pair_of(scaling.beta_fast, rope, scaling.original_context)
    last = _pair_of(scaling.beta_slow, rope, scaling.original_context)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    unscaled = 1 - torch.clamp((pairs - first) / (last - first), 0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - unscaled) + 1.0 / wavelengths * unscaled


def _pair_of(turns: float, rope: RopeConfig, context: int) -> float:
    """Returns the (fractional) index of the pair that makes this many turns within
    `context` tokens.
    """
    turn_tokens = context / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(turn_tokens) / (2 * math.log(rope.theta))


def rotary_tables(ropes: Sequence[RopeConfig], num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [num_positions, num_ropes, rotary_dim / 2] FP32 each."""
    positions = torch.arange(num_positions).float()
    angles = torch.stack(
        [torch.outer(positions, inverse_frequencies(rope)) for rope in ropes], dim=1
    )
    factors = torch.tensor([rope.attention_factor for rope in ropes]).unsqueeze(1)
    return angles.cos().mul_(factors), angles.sin().mul_(factors)
