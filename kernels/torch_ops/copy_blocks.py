"""Copies full blocks of the paged cache, in all layers."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_blocks(kv_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """sources, destinations [N]: block ids; no two destinations may be the same.

    kv_cache [num_layers, planes, num_blocks, num_kv_heads, block_size, head_dim] is written in
    place, once all sources are read.
    """
    if kv_cache.element_size() == 1:
        kv_cache = kv_cache.view(torch.uint8)  # torch cannot copy FP8 by index
    kv_cache.index_copy_(2, destinations.long(), kv_cache.index_select(2, sources))
