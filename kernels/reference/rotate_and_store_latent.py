"""The cache write of multi-head latent attention, and the rotation of its queries.

A row of the cache is the latent after its norm, and then the rotated key that all heads share
(DeepSeek-V2, 2024, section 2.1.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotary import rotary
from kernels.reference.store_kv import scaled_bytes


def rotate_and_store_latent(
    query: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm: Tensor,
    eps: float,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """query [T, num_heads, R], the parts of queries with positions -> the same, rotated.

    latent [T, L + R] is stored: `rms_norm` of its first L elements with the weight `norm` [L], and
    `rotary` of the others. cos, sin [T, R / 2] FP32. kv_cache [1, num_blocks, 1, block_size, L + R]
    is written at slot_mapping [T], block_id * block_size + offset; -1 skips a token. kv_scales
    [2, 1] FP32, of an FP8 e4m3 cache: the first is that of rows, as in `store_kv`. The result is
    written to `out`, whose rows of heads may be parts of longer ones.
    """
    normed = rms_norm(latent[:, : len(norm)], norm, eps)
    rotated = rotate_and_store_normed(
        *(query, normed, latent, cos, sin, kv_cache, slot_mapping), kv_scales=kv_scales
    )
    return rotated if out is None else out.copy_(rotated)


def rotate_and_store_normed(
    query: Tensor,
    normed: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Computes `rotate_and_store_latent` with the normed part of `latent`, [T, L]."""
    key = latent[:, None, normed.shape[1] :]
    rotated = rotary(torch.cat((query, key), dim=1), cos, sin)
    rows = torch.cat((normed, rotated[:, -1]), dim=1)
    if kv_scales is not None:
        rows = scaled_bytes(rows[:, None], kv_scales[0])[:, 0]
        kv_cache = kv_cache.view(torch.uint8)  # torch cannot copy FP8 by index
    slots = slot_mapping.long()
    if bool((slots < 0).any()):
        kept = torch.nonzero(slots >= 0).squeeze(1)
        rows, slots = rows[kept], slots[kept]
    kv_cache.view(-1, rows.shape[1]).index_copy_(0, slots, rows)
    return rotated[:, :-1]
