"""The checksum of transferred KV: a sum that depends on every word and its position.

    sum over i of fmix64(word[i] + (i + 1) · G) mod 2**64,   G = 2**64 / golden ratio, odd

over the payload as 64-bit words, with murmur3's finaliser

    fmix64(h): h ^= h >> 33; h *= 0xFF51AFD7ED558CCD; h ^= h >> 33; h *= 0xC4CEB9FE1A85EC53;
               h ^= h >> 33

A sum has no order, so programs on a GPU add their parts in any order. It detects accidents, not
attacks: there is no key.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
WORD_BYTES = 8


def payload_checksum(payload: Tensor) -> Tensor:
    """A contiguous payload of any shape and dtype, in full words -> [1] int64, the sum's bits."""
    words = payload.view(-1).view(torch.int64)
    places = torch.arange(1, len(words) + 1, device=payload.device)
    mixed = words + places * _signed(GOLDEN)
    for factor in FACTORS:
        mixed = (mixed ^ _shifted(mixed)) * _signed(factor)
    return (mixed ^ _shifted(mixed)).sum().view(1)


def _shifted(words: Tensor) -> Tensor:
    """Shifts right by 33 bits, filling with zeros: int64's own shift repeats the sign."""
    return words >> 33 & (1 << 31) - 1


def _signed(word: int) -> int:
    """Returns the int64 of the same bits."""
    return (word ^ 1 << 63) - (1 << 63)
