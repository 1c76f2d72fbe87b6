"""Rotary position embedding of queries and keys, and the cache write of keys and values, in one."""

from __future__ import annotations

from torch import Tensor

from kernels.reference.rotary import rotary
from kernels.reference.store_kv import store_kv


def rotate_and_store(
    heads: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """heads [T, num_heads + 2 * num_kv_heads, D] of queries, keys, values -> rotated queries.

    `rotary` of queries and keys, and `store_kv` of the rotated keys and the values.
    """
    num_kv_heads = kv_cache.shape[2]
    query, key = rotary(heads[:, :-num_kv_heads], cos, sin).tensor_split((-num_kv_heads,), dim=1)
    store_kv(key, heads[:, -num_kv_heads:], kv_cache, slot_mapping)
    return query.contiguous()
