"""Draws one token a row: temperature, top-k, top-p, min-p, then the Gumbel-max trick.

    token = argmax(logits / temperature + noise),  noise = -log(-log(u))

u is a pure function of (seed, choice_index, output_position, token id) by 32-bit integer mixing
(murmur3's finaliser), so a draw depends on nothing else: not on batch, row or worker.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1


def _mix(h: Tensor) -> Tensor:
    """murmur3's fmix32 on int64 tensors that hold u32 values."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & _MASK
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & _MASK
    return h ^ (h >> 16)


def uniform(seed: Tensor, choice_index: Tensor, output_position: Tensor, vocab_size: int) -> Tensor:
    """[R] int64 each (`seed` as the bit pattern of a u64) -> [R, vocab_size] FP32 in (0, 1)."""
    row = torch.zeros_like(seed)
    for word in (seed, seed >> 32, choice_index, output_position):
        row = _mix(((row ^ (word & _MASK)) * 5 + 0xE6546B64) & _MASK)
    tokens = torch.arange(vocab_size, device=seed.device) * _GOLDEN & _MASK
    bits = _mix(_mix(row.unsqueeze(1) ^ tokens) ^ _mix(row + _GOLDEN & _MASK).unsqueeze(1))
    # 23 bits and a half: the largest is 1 - 2**-24, which FP32 holds.
    return (bits >> 9).float().mul_(2.0**-23).add_(2.0**-24)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice_index: Tensor,
    output_position: Tensor,
) -> Tensor:
    """logits [R, vocab_size] FP32; the others [R] -> [R] int64 token ids.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Of equal logits greedy takes the
    lowest id; a truncation keeps all that equal the last one kept.
    """
    tokens = logits.argmax(-1)
    drawn = torch.nonzero(temperature > 0).squeeze(1)
    if not len(drawn):
        return tokens
    scaled = scale(logits[drawn], temperature[drawn], top_k[drawn], top_p[drawn], min_p[drawn])
    noise = uniform(seed[drawn], choice_index[drawn], output_position[drawn], logits.shape[1])
    tokens[drawn] = scaled.sub_(noise.log_().neg_().log_()).argmax(-1)
    return tokens


def scale(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The logits of what is drawn from: logits [R, vocab_size], overwritten; the others [R], each
    temperature > 0 -> [R, vocab_size], -inf where nothing may be drawn.
    """
    # from the maximum down, so that the least temperature overflows to -inf, never to inf
    logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature.unsqueeze(1))
    _truncate(logits, top_k, top_p, min_p)
    return logits


def _truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Sets what may not be drawn to -inf. Only rows with top-k or top-p are sorted."""
    floor = torch.full_like(scaled[:, 0], float("-inf"))
    limited = torch.nonzero((top_k > 0) | (top_p < 1)).squeeze(1)
    if len(limited):
        floor[limited] = _floors(scaled[limited], top_k[limited], top_p[limited])
    # p >= min_p * max(p), in logits; min_p = 0 gives -inf
    floor = torch.maximum(floor, scaled.amax(-1) + min_p.log())
    scaled.masked_fill_(scaled < floor.unsqueeze(1), float("-inf"))


def _floors(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest scaled logit that top-k, then top-p, keep. [R]"""
    vocab_size = scaled.shape[1]
    ordered = scaled.sort(dim=-1, descending=True).values
    rank = torch.arange(vocab_size, device=scaled.device)
    num_kept = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    kth = ordered.gather(1, (num_kept - 1).unsqueeze(1))
    outside = (rank >= num_kept.unsqueeze(1)) & (ordered < kth)
    weights = (ordered - ordered[:, :1]).exp_().masked_fill_(outside, 0.0)
    cumulative = weights.cumsum(-1)
    before = cumulative - weights
    is_kept = (before < top_p.unsqueeze(1) * cumulative[:, -1:]) & ~outside
    last = is_kept.sum(-1, keepdim=True).clamp(min=1) - 1
    return torch.where(top_p < 1, ordered.gather(1, last).squeeze(1), kth.squeeze(1))
