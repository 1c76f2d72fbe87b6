"""Writes the new tokens' keys and values into their slots of one layer's paged cache."""

from __future__ import annotations

import torch
from torch import Tensor


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """key, value [T, num_kv_heads, head_dim]; slot_mapping [T], block_id * block_size + offset.

    kv_cache [2, num_blocks, num_kv_heads, block_size, head_dim] is written in place.
    A slot of -1 skips its token. No two tokens may name one slot.
    """
    if bool((slot_mapping < 0).any()):
        kept = torch.nonzero(slot_mapping >= 0).squeeze(1)
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    offset = slot_mapping % block_size
    first = (slot_mapping - offset) * num_kv_heads + offset  # the row of KV head 0
    heads = torch.arange(num_kv_heads, device=key.device) * block_size
    rows = (first.unsqueeze(1) + heads).view(-1)  # [T * num_kv_heads]
    for plane, new in zip(kv_cache.unbind(0), (key, value), strict=True):
        plane.view(-1, head_dim).index_copy_(0, rows, new.reshape(-1, head_dim))
