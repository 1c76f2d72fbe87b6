"""Samples one token per row: temperature, top-k, top-p, min-p, then the Gumbel-max trick.

    token = argmax(logits / temperature + noise),  noise = -log(-log(u))

u is a pure function of (seed, choice_index, output_position, token id) by 32-bit integer mixing
(murmur3's finaliser), so a sample depends on nothing else: not on batch, row or worker.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B1
MIX_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
ROW_OFFSET = 0xE6546B64
NUM_NEAR = 512  # logits that are sorted to find a limit among them
PIECE = 1 << 17  # elements that are mixed at a time: 512 KiB, which stay in a core's cache


def argmax(x: Tensor) -> Tensor:
    """x [R, n] FP32 -> [R] int64; the first index among equal maxima.

    On the CPU by numpy, which compares vectors: 32,000 columns take a fourteenth of torch's time.
    """
    return torch.from_numpy(x.numpy().argmax(-1)) if x.is_cpu else x.argmax(-1)


def _signed(word: int) -> int:
    """Returns the int32 of the same bits."""
    return (word & _MASK ^ 0x80000000) - 0x80000000


def _mix_(h: Tensor) -> Tensor:
    """murmur3's fmix32, in place on int32, whose products wrap and whose shifts repeat the sign."""
    h ^= h >> 16 & 0xFFFF
    h *= _signed(MIX_FACTORS[0])
    h ^= h >> 13 & 0x7FFFF
    h *= _signed(MIX_FACTORS[1])
    h ^= h >> 16 & 0xFFFF
    return h


def uniform(seed: Tensor, choice_index: Tensor, output_position: Tensor, vocab_size: int) -> Tensor:
    """[R] int64 each (`seed` as the bit pattern of a u64) -> [R, vocab_size] FP32 in (0, 1)."""
    row = torch.zeros_like(seed, dtype=torch.int32)
    for word in (seed, seed >> 32, choice_index, output_position):
        row = _mix_((row ^ word.int()) * 5 + _signed(ROW_OFFSET))
    salt = _mix_(row + _signed(GOLDEN))
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=seed.device) * _signed(GOLDEN)
    sampled = torch.empty((len(seed), vocab_size), dtype=torch.float32, device=seed.device)
    num_rows = max(1, PIECE // vocab_size)
    for first in range(0, len(seed), num_rows):
        piece = slice(first, first + num_rows)
        bits = _mix_(row[piece].unsqueeze(1) ^ tokens)
        bits = _mix_(bits.bitwise_xor_(salt[piece].unsqueeze(1)))
        # 23 bits and a half: the largest is 1 - 2**-24, which FP32 can represent.
        sampled[piece] = bits >> 9 & 0x7FFFFF
    return sampled.mul_(2.0**-23).add_(2.0**-24)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice_index: Tensor,
    output_position: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """logits [R, vocab_size] FP32; the others [R] -> [R] int64 token ids.

    mask [R, ceil(vocab_size / 32)] int32: bit t % 32 of word t // 32 is set if token t is allowed;
    other tokens count as -inf. None allows all.
    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Among equal logits greedy takes
    the lowest id; a truncation includes all tokens that equal the last one included.
    """
    if mask is not None:
        logits = logits.masked_fill(~_allowed(mask, logits.shape[1]), float("-inf"))
    tokens = argmax(logits)
    sampled = torch.nonzero(temperature > 0).squeeze(1)
    if not len(sampled):
        return tokens
    scaled = scale(
        logits[sampled], temperature[sampled], top_k[sampled], top_p[sampled], min_p[sampled]
    )
    noise = uniform(seed[sampled], choice_index[sampled], output_position[sampled], logits.shape[1])
    tokens[sampled] = argmax(scaled.sub_(noise.log_().neg_().log_()))
    return tokens


def _allowed(mask: Tensor, vocab_size: int) -> Tensor:
    """[R, ceil(vocab_size / 32)] int32 -> [R, vocab_size] bool."""
    bits = mask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=mask.device) & 1
    return bits.flatten(1)[:, :vocab_size] != 0


def scale(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Returns the logits to sample from: logits [R, vocab_size], overwritten; the others [R], each
    temperature > 0 -> [R, vocab_size], -inf for excluded tokens.
    """
    # subtracting the maximum makes the smallest temperature overflow to -inf, never to inf
    logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature.unsqueeze(1))
    _truncate(logits, top_k, top_p, min_p)
    return logits


def _truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Sets excluded tokens to -inf. Only rows with top-k or top-p are sorted."""
    floor = torch.full_like(scaled[:, 0], float("-inf"))
    limited = torch.nonzero((top_k > 0) | (top_p < 1)).squeeze(1)
    if len(limited):
        counts = top_k[limited]
        # one more than a row may include, so that its limit is detected
        num_near = int(counts.max()) + 1 if bool((counts > 0).all()) else NUM_NEAR
        num_near = min(num_near, NUM_NEAR)
        floor[limited] = _floors(scaled[limited], counts, top_p[limited], num_near)
    # p >= min_p * max(p), in logits; min_p = 0 gives -inf
    floor = torch.maximum(floor, scaled.amax(-1) + min_p.log())
    scaled.masked_fill_(scaled < floor.unsqueeze(1), float("-inf"))


def _floors(scaled: Tensor, top_k: Tensor, top_p: Tensor, num_near: int) -> Tensor:
    """Returns the smallest scaled logit within top-k, then top-p; searched among the `num_near`
    largest, and among all only for rows whose limit is below them. [R]
    """
    vocab_size = scaled.shape[1]
    near = scaled.topk(min(num_near, vocab_size), dim=-1).values
    num_ordered = near.shape[1]
    top_k = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size).unsqueeze(1)
    kth = near.gather(1, top_k.clamp(max=num_ordered) - 1)
    kth.masked_fill_(top_k == vocab_size, float("-inf"))
    # row by row from the first token on, so that the sum depends on nothing else
    total = scaled.exp().masked_fill_(scaled < kth, 0.0).cumsum(-1)[:, -1:]
    weights = near.exp().masked_fill_(near < kth, 0.0)
    before = weights.cumsum(-1) - weights
    is_kept = (before < top_p.unsqueeze(1) * total) & (near >= kth)
    last = is_kept.sum(-1, keepdim=True).clamp(min=1) - 1
    is_nucleus = (top_p < 1).unsqueeze(1)
    floors = torch.where(is_nucleus, near.gather(1, last), kth).squeeze(1)
    if num_ordered < vocab_size:
        is_beyond = is_nucleus & is_kept[:, -1:] | (top_k > num_ordered) & (top_k < vocab_size)
        rest = torch.nonzero(is_beyond.squeeze(1)).squeeze(1)
        if len(rest):
            floors[rest] = _floors(scaled[rest], top_k[rest].squeeze(1), top_p[rest], vocab_size)
    return floors
