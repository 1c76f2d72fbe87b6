"""Writes the new tokens' keys and values into their slots of one layer's paged cache.

An FP8 cache holds x · (1 / scale), with one scale for the keys and one for the values of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_LARGEST = 448.0  # largest e4m3, which has no infinity


def store_kv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None = None,
) -> None:
    """key, value [T, num_kv_heads, head_dim]; slot_mapping [T], block_id * block_size + offset.

    kv_cache [2, num_blocks, num_kv_heads, block_size, head_dim] is written in place.
    A slot of -1 skips its token. Two tokens must not have the same slot.
    kv_scales [2, num_kv_heads] FP32 is for an FP8 e4m3 cache: values that are too large saturate.
    """
    slot_mapping = slot_mapping.long()
    if kv_scales is not None:
        key, value = (
            scaled_bytes(x, each) for x, each in zip((key, value), kv_scales, strict=True)
        )
        kv_cache = kv_cache.view(torch.uint8)  # torch cannot copy FP8 by index
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


def scaled_bytes(x: Tensor, scales: Tensor) -> Tensor:
    """x [T, num_kv_heads, head_dim], scales [num_kv_heads] -> the bytes of FP8, in x's shape."""
    inverse = scales.reciprocal().unsqueeze(1)
    wide = (x.float() * inverse).clamp_(-FP8_LARGEST, FP8_LARGEST)
    return wide.to(torch.float8_e4m3fn).view(torch.uint8)
