"""Rotary position embedding of queries and keys, fused with the cache write of keys and values.

The compiled RMS norm normalises queries and keys before. FP8 caches use the reference.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.layer.rms_norm import rms_norm
from kernels.cpu.simd.intrinsics import FEW_ROWS, array, narrow, widen
from kernels.reference.rotate_and_store import rotate_and_store as reference_rotate_and_store


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

    cos, sin [T, rotary_dim / 2] FP32: with the first rotary_dim elements of a head = (a, b) split
    in the middle, (a·cos - b·sin, b·cos + a·sin) in FP32, rounded once; the rest is unchanged.
    kv_cache [2, num_blocks, num_kv_heads, block_size, D] is written at slot_mapping [T],
    block_id * block_size + offset; -1 skips a token. Two tokens must not have the same slot.
    query_norm, key_norm [D]: the weights of the norms of queries and keys; either both or neither.
    """
    num_kv_heads = kv_cache.shape[2]
    if query_norm is not None and key_norm is not None:
        query, key, value = heads.tensor_split((-2 * num_kv_heads, -num_kv_heads), dim=1)
        query = rms_norm(query, query_norm, eps, has_unit_offset=has_unit_offset)
        key = rms_norm(key, key_norm, eps, has_unit_offset=has_unit_offset)
        heads = torch.cat((query, key, value), dim=1)
    if kv_scales is not None:
        return reference_rotate_and_store(
            heads, cos, sin, kv_cache, slot_mapping, kv_scales=kv_scales
        )
    num_tokens, num_all, head_dim = heads.shape
    query = torch.empty((num_tokens, num_all - 2 * num_kv_heads, head_dim), dtype=heads.dtype)
    key, value = kv_cache.unbind(0)
    arguments = (
        array(heads.contiguous()),
        cos.contiguous().numpy(),
        sin.contiguous().numpy(),
        slot_mapping.long().contiguous().numpy(),
        array(query),
        array(key),
        array(value),
    )
    if num_tokens <= FEW_ROWS:
        _rotate_and_store(*arguments, 0, num_tokens)
    else:
        _rotate_and_store_in_parallel(*arguments, numba.get_num_threads())
    return query


@compiled(parallel=True)
def _rotate_and_store_in_parallel(
    heads: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    query: Any,
    key: Any,
    value: Any,
    num_tasks: int,
) -> None:
    for task in prange(num_tasks):
        first, end = len(heads) * task // num_tasks, len(heads) * (task + 1) // num_tasks
        _rotate_and_store(heads, cos, sin, slots, query, key, value, first, end)


@compiled()
def _rotate_and_store(
    heads: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    query: Any,
    key: Any,
    value: Any,
    first: int,
    end: int,
) -> None:
    num_kv_heads, block_size = key.shape[1], key.shape[2]
    num_heads = query.shape[1]
    for token in range(first, end):
        for head in range(num_heads):
            _rotate(heads[token, head], cos[token], sin[token], query[token, head])
        if slots[token] < 0:
            continue
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_kv_heads):
            _rotate(
                heads[token, num_heads + head], cos[token], sin[token], key[block, head, offset]
            )
            _copy(heads[token, num_heads + num_kv_heads + head], value[block, head, offset])


@compiled(is_inlined=True)
def _rotate(x: Any, cos: Any, sin: Any, out: Any) -> None:
    half = np.uintp(len(cos))  # unsigned: an index that could be negative prevents vectorisation
    for index in range(len(cos)):
        upper = np.uintp(index) + half
        a, b = widen(x[index]), widen(x[upper])
        out[index] = narrow(a * cos[index] - b * sin[index], out.dtype)
        out[upper] = narrow(b * cos[index] + a * sin[index], out.dtype)
    for index in range(2 * len(cos), len(x)):
        out[index] = x[index]


@compiled(is_inlined=True)
def _copy(x: Any, out: Any) -> None:
    for index in range(len(x)):
        out[index] = x[index]
