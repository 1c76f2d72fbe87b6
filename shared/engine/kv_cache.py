"""The paged KV cache of a model: one tensor for all layers.

Within a block the head dimension precedes the token dimension, so that a gather of a sequence's
blocks yields contiguous operands of a GEMM for each head, without another copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kv_layout import KvLayout


def num_blocks_for(kv_layout: KvLayout, kv_cache_bytes: int) -> int:
    """Raises ConfigError if not even one block fits."""
    num_blocks = kv_cache_bytes // kv_layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_bytes {kv_cache_bytes} holds no block of {kv_layout.block_size} tokens "
            f"({kv_layout.block_bytes} bytes)"
        )
    return num_blocks


def allocate_kv_cache(kv_layout: KvLayout, num_blocks: int, device: torch.device) -> Tensor:
    """[num_slots, planes, num_blocks, heads, block_size, dim], zeroed."""
    planes, heads, dim = kv_layout.state.row
    shape = (kv_layout.num_slots, planes, num_blocks, heads, kv_layout.block_size, dim)
    return torch.zeros(shape, dtype=getattr(torch, kv_layout.dtype), device=device)
