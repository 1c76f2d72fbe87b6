"""The paged KV cache of a model: one tensor for all layers.

Within a block the head dimension precedes the token dimension, so that a gather of a sequence's
blocks yields contiguous operands of a GEMM for each head, without another copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kv_format import KvFormat


def num_blocks_for(kv_format: KvFormat, kv_cache_bytes: int) -> int:
    """Raises ConfigError if not even one block fits."""
    num_blocks = kv_cache_bytes // (kv_format.bytes_per_token * kv_format.block_size)
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_bytes {kv_cache_bytes} holds no block of {kv_format.block_size} tokens "
            f"({kv_format.bytes_per_token} bytes per token)"
        )
    return num_blocks


def allocate_kv_cache(kv_format: KvFormat, num_blocks: int, device: torch.device) -> Tensor:
    """[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim], zeroed."""
    shape = (
        kv_format.num_layers,
        2,
        num_blocks,
        kv_format.num_kv_heads,
        kv_format.block_size,
        kv_format.head_dim,
    )
    return torch.zeros(shape, dtype=getattr(torch, kv_format.dtype), device=device)
