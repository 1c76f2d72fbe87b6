"""Rotary position embedding of queries and keys, fused with the cache write of keys and values.

If queries and keys have norms (QK norm), these are applied first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotary import rotary
from kernels.reference.store_kv import store_kv


def rotate_and_store(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    has_unit_offset: bool = False,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """heads [T, num_heads + 2 * num_kv_heads, D] of queries, keys, values -> rotated queries.

    `rms_norm` of each query and key if query_norm and key_norm [D] are given, either both or
    neither; `rotary` of queries and keys, and `store_kv` of the rotated keys and the values.
    """
    num_kv_heads = kv_cache.shape[2]
    value = heads[:, -num_kv_heads:]
    query, key = heads[:, :-num_kv_heads].tensor_split((-num_kv_heads,), dim=1)
    if query_norm is not None and key_norm is not None:
        query = rms_norm(query, query_norm, eps, has_unit_offset=has_unit_offset)
        key = rms_norm(key, key_norm, eps, has_unit_offset=has_unit_offset)
    rotated = rotary(torch.cat((query, key), dim=1), cos, sin)
    query, key = rotated.tensor_split((-num_kv_heads,), dim=1)
    store_kv(key, value, kv_cache, slot_mapping, kv_scales=kv_scales)
    return query.contiguous()
