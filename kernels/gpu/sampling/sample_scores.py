"""Converts a row of logits to the scores for sampling: q = (max - logit) / temperature."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.sampling.sample_noise import uniform

INFINITY = tl.constexpr(float("inf"))
LARGEST = tl.constexpr(0x7F7FFFFF)  # the bits of the largest finite number


@triton.jit
def load_logits(logits_ptr, mask_ptr, vocab_size, token, HAS_MASK: tl.constexpr):
    """A row's logits. -inf for tokens beyond the last, and for tokens that the mask excludes."""
    is_inside = token < vocab_size
    x = tl.load(logits_ptr + token, mask=is_inside, other=-INFINITY)
    if HAS_MASK:
        word = tl.load(mask_ptr + token // 32, mask=is_inside, other=0)
        x = tl.where((word >> (token % 32)) & 1 != 0, x, -INFINITY)
    return x


@triton.jit
def distance(x, top, temperature):
    """q: 0 for the largest logit, which may be infinite; infinite for -inf."""
    q = tl.div_rn(top - x, temperature)
    return tl.where(x == -INFINITY, INFINITY, tl.where(x == top, 0.0, q))


@triton.jit
def min_p_bound(min_p_ptr, row):
    """The limit p >= min_p · max(p), as q."""
    return tl.maximum(-tl.log(tl.load(min_p_ptr + row)), 0.0)


@triton.jit
def noisy(q, token, key):
    """The logit plus its Gumbel noise."""
    return -q - tl.log(-tl.log(uniform(token, key)))
