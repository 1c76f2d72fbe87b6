"""Writes the new tokens' keys and values into their slots of one layer's paged cache."""

from __future__ import annotations

import torch
from torch import Tensor


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """key, value [T, num_kv_heads, head_dim]; slot_mapping [T], block_id * block_size + offset.

    kv_cache [2, num_kv_heads, num_blocks, block_size, head_dim] is written in place.
    A slot of -1 skips its token. No two tokens may name one slot.
    """
    if bool((slot_mapping < 0).any()):
        kept = torch.nonzero(slot_mapping >= 0).squeeze(1)
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    _, num_kv_heads, num_blocks, block_size, head_dim = kv_cache.shape
    num_slots = num_blocks * block_size
    heads = torch.arange(2 * num_kv_heads, device=key.device) * num_slots
    rows = (slot_mapping.unsqueeze(1) + heads).view(-1)  # [T * 2 * num_kv_heads]
    new = torch.cat((key, value), dim=1).view(-1, head_dim)
    kv_cache.view(2 * num_kv_heads * num_slots, head_dim).index_copy_(0, rows, new)
