"""Attention of runs of new tokens over their paged contexts, causal: softmax(q·Kᵀ·scale)·V."""

from __future__ import annotations

import torch
from torch import Tensor


def prefill_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    lower: Tensor | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    value_dim: int | None = None,
    sinks: Tensor | None = None,
    is_batch_invariant: bool = False,
) -> Tensor:
    """query [T, num_heads, D], sequences concatenated -> same shape and dtype; computed in FP32.

    kv_cache [2, num_blocks, num_kv_heads, block_size, D]; block_tables [S, max_blocks];
    cu_seqlens_q [S + 1]; context_lens [S] includes the new tokens, whose KV is already stored. A
    token attends to the tokens up to itself, from position lower[i] on; `lower` [T] int32 does not
    decrease within a sequence, and earlier blocks need not exist. `softcap` maps a score s to cap ·
    tanh(s / cap). `kv_scales` [2, num_kv_heads] in FP32 are the factors of a head's stored keys and
    values, in a cache of FP8 e4m3 or any other dtype. With `value_dim`, values are the first
    elements of their keys and have their scale, kv_cache has one plane and one head, and the result
    is [T, num_heads, value_dim] (multi-head latent attention with absorbed projections:
    DeepSeek-V2, 2024, section 2.1). `sinks` [num_heads] in FP32 are one more score of each head, of
    a key whose value is zero: weights then add up to less than 1 (gpt-oss; Xiao and others,
    Efficient streaming language models with attention sinks, 2024). With `is_batch_invariant`, a
    token's bits depend only on itself and the tokens that it attends to; here they always do.
    """
    width = query.shape[2] if value_dim is None else value_dim
    out = query.new_empty((*query.shape[:2], width))
    starts = cu_seqlens_q.tolist()
    for index, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        bounds = None if lower is None or rows.start == rows.stop else lower[rows]
        first = 0 if bounds is None else int(bounds[0])
        key, value = _context(kv_cache, kv_scales, block_tables[index], first, context_len)
        scores = torch.einsum("qhd,khd->hqk", query[rows].float() * scale, _spread(key, query))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores.masked_fill_(
            _is_hidden(rows.stop - rows.start, context_len, bounds, query), -torch.inf
        )
        value = _spread(value, query)[..., :width]
        out[rows] = torch.einsum("hqk,khd->qhd", _weights(scores, sinks), value)
    return out


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """scores [num_heads, tokens, keys] -> the same shape."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def _context(
    kv_cache: Tensor, kv_scales: Tensor | None, block_table: Tensor, first: int, context_len: int
) -> tuple[Tensor, Tensor]:
    """FP32 keys and values of one sequence, [context_len, num_kv_heads, D] each; zero before
    `first`, where a block may be of another sequence.
    """
    block_size = kv_cache.shape[3]
    tokens = torch.arange(context_len, device=kv_cache.device)
    blocks = block_table[tokens // block_size]
    stored = kv_cache.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else kv_cache
    kv = stored[:, blocks, :, tokens % block_size].view(kv_cache.dtype).float()
    if kv_scales is not None:
        kv *= kv_scales[: kv.shape[1]].unsqueeze(-1)
    kv[:first] = 0
    return kv[:, 0], kv[:, -1]


def _spread(kv: Tensor, query: Tensor) -> Tensor:
    """Repeats each KV head for every query head that shares it."""
    return kv.repeat_interleave(query.shape[1] // kv.shape[1], dim=1)


def _is_hidden(num_tokens: int, context_len: int, lower: Tensor | None, like: Tensor) -> Tensor:
    """[num_tokens, context_len]"""
    position = torch.arange(context_len - num_tokens, context_len, device=like.device).unsqueeze(1)
    token = torch.arange(context_len, device=like.device)
    is_hidden = token > position
    return is_hidden if lower is None else is_hidden | (token < lower.unsqueeze(1))
