"""Noise for sampling: a hash of seed, choice, position and token, like the reference's.

uniform = 23 bits of the hash, in (0, 1);   Gumbel noise = -log(-log(uniform))
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(h):
    """murmur3's fmix32 of uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def noise_key(seed_ptr, choice_index_ptr, output_position_ptr, row):
    """The part of the hash that all tokens of a row share."""
    seed = tl.load(seed_ptr + row)
    key = _mix((seed.to(tl.uint32) * 5) + 0xE6546B64)
    key = _mix((key ^ (seed >> 32).to(tl.uint32)) * 5 + 0xE6546B64)
    key = _mix((key ^ tl.load(choice_index_ptr + row).to(tl.uint32)) * 5 + 0xE6546B64)
    return _mix((key ^ tl.load(output_position_ptr + row).to(tl.uint32)) * 5 + 0xE6546B64)


@triton.jit
def uniform(token, key):
    """FP32 in (0, 1), bit-identical to the reference's; `token` int32."""
    bits = _mix(key ^ (token.to(tl.uint32) * 0x9E3779B1))
    bits = _mix(bits ^ _mix(key + 0x9E3779B1))
    return (bits >> 9).to(tl.int32).to(tl.float32) * (2.0**-23) + (2.0**-24)
