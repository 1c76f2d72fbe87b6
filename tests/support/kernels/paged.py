"""Paged caches of one layer, and slots in them."""

from __future__ import annotations

import torch
from torch import Tensor


def slots_of(num_tokens: int, num_slots: int, device: torch.device) -> Tensor:
    """Slots in random order; every fifth token has none."""
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(5))[:num_tokens]
    slots[2::5] = -1
    return slots.to(device)


def empty_cache(
    num_tokens: int, num_kv_heads: int, block_size: int, like: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns a cache of NaN, so that missing and unexpected writes are detected."""
    num_blocks = -(-num_tokens // block_size) + 2
    shape = (2, num_blocks, num_kv_heads, block_size, like.shape[2])
    return torch.full(shape, torch.nan, device=like.device).to(dtype)
