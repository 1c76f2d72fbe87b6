"""Rotary position embedding of queries and keys, and the cache write of keys and values, in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cpu.compiled import compiled
from kernels.cpu.lanes import array, narrow, widen


def rotate_and_store(
    heads: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """heads [T, num_heads + 2 * num_kv_heads, D] of queries, keys, values -> rotated queries.

    cos, sin [T, rotary_dim / 2] FP32: with the first rotary_dim elements of a head = (a, b) split
    in the middle, (a·cos - b·sin, b·cos + a·sin) in FP32, rounded once; the rest stays as it is.
    kv_cache [2, num_blocks, num_kv_heads, block_size, D] is written at slot_mapping [T],
    block_id * block_size + offset; -1 skips a token. No two tokens may name one slot.
    """
    num_tokens, num_all, head_dim = heads.shape
    num_kv_heads = kv_cache.shape[2]
    query = torch.empty((num_tokens, num_all - 2 * num_kv_heads, head_dim), dtype=heads.dtype)
    key, value = kv_cache.unbind(0)
    _rotate_and_store(
        array(heads.contiguous()),
        cos.contiguous().numpy(),
        sin.contiguous().numpy(),
        slot_mapping.numpy(),
        array(query),
        array(key),
        array(value),
    )
    return query


@compiled()
def _rotate_and_store(
    heads: Any, cos: Any, sin: Any, slots: Any, query: Any, key: Any, value: Any
) -> None:
    num_kv_heads, block_size = key.shape[1], key.shape[2]
    num_heads = query.shape[1]
    for token in range(heads.shape[0]):
        for head in range(num_heads):
            _rotate(heads[token, head], cos[token], sin[token], query[token, head])
        if slots[token] < 0:
            continue
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_kv_heads):
            _rotate(
                heads[token, num_heads + head], cos[token], sin[token], key[block, head, offset]
            )
            value[block, head, offset, :] = heads[token, num_heads + num_kv_heads + head]


@compiled()
def _rotate(x: Any, cos: Any, sin: Any, out: Any) -> None:
    half = cos.shape[0]
    first, second = x[:half], x[half : 2 * half]
    out_first, out_second = out[:half], out[half : 2 * half]
    for index in range(half):
        a, b = widen(first[index]), widen(second[index])
        out_first[index] = narrow(a * cos[index] - b * sin[index], out.dtype)
        out_second[index] = narrow(b * cos[index] + a * sin[index], out.dtype)
    out[2 * half :] = x[2 * half :]
