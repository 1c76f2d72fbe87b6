"""Inputs of benchmarks of the paged cache, in the state of a fleet that has run for a while: tokens
and sequences have their blocks in random order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.kernels.timing import random

FP8 = torch.float8_e4m3fn


def layer_cache(num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """The cache of one layer, with blocks of 16 tokens."""
    return random(2, -(-num_tokens // 16), num_kv_heads, 16, head_dim).to(dtype)


def scattered_slots(num_tokens: int) -> Tensor:
    """Consecutive tokens in blocks of 16 in random order."""
    blocks = torch.randperm(-(-num_tokens // 16), device="cuda")
    slots = blocks.unsqueeze(1) * 16 + torch.arange(16, device="cuda")
    return slots.view(-1)[:num_tokens]


def scales(num_kv_heads: int) -> Tensor:
    return torch.rand(2, num_kv_heads, device="cuda") + 0.01


def angles(num_tokens: int, half: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [num_tokens, half] FP32 each."""
    turned = random(num_tokens, half, dtype=torch.float32)
    return turned.cos(), turned.sin()
