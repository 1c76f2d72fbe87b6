"""Samples among the few tokens that each row may sample: `sample` in less time, on the CPU.

    token = argmax(logits / temperature + noise) over the allowed tokens

Rows are flat, one after the other. By numpy, whose operations on few numbers take a tenth of
torch's time; logarithms are torch's, so the tokens are those of `sample` bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.torch_ops.sample import GOLDEN, MIX_FACTORS, ROW_OFFSET

Words = NDArray[np.uint32]


def sample_among(
    logits: NDArray[np.float32],
    token_ids: NDArray[np.int64],
    starts: NDArray[np.int64],
    temperature: NDArray[np.float32],
    min_p: NDArray[np.float32],
    seed: NDArray[np.uint64],
    choice_index: NDArray[np.int64],
    output_position: NDArray[np.int64],
) -> NDArray[np.int64]:
    """logits and token_ids [K], ascending in each row; starts [R] of the rows, none of which is
    empty; the others [R], as of `sample`, without top-k and top-p -> [R] token ids.
    """
    row = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(logits)))
    is_sampled = temperature > 0
    if is_sampled.any():
        with np.errstate(invalid="ignore"):  # all of a row may be infinite
            scaled = logits - np.maximum.reduceat(logits, starts)[row]
        scaled /= np.where(is_sampled, temperature, np.float32(1))[row]
        if min_p.any():
            scaled[scaled < _log(min_p)[row]] = -np.inf
        scaled -= _log(-_log(_uniform(row, token_ids, seed, choice_index, output_position)))
        logits = scaled if is_sampled.all() else np.where(is_sampled[row], scaled, logits)
    return token_ids[_first_of_largest(logits, row, starts)]


def _first_of_largest(
    scores: NDArray[np.float32], row: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[R] indices; as in an argmax, NaN is the largest."""
    scores = np.where(np.isnan(scores), np.float32(np.inf), scores)
    largest = np.flatnonzero(scores == np.maximum.reduceat(scores, starts)[row])
    return largest[np.searchsorted(largest, starts)]


def _uniform(
    row: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    seed: NDArray[np.uint64],
    choice_index: NDArray[np.int64],
    output_position: NDArray[np.int64],
) -> NDArray[np.float32]:
    """[K] in (0, 1): those of `sample.uniform`."""
    hashes = np.zeros(len(seed), np.uint32)
    for words in (seed, seed >> np.uint64(32), choice_index, output_position):
        hashes ^= words.astype(np.uint32)
        hashes *= np.uint32(5)
        hashes += np.uint32(ROW_OFFSET)
        _mix(hashes)
    salts = hashes + np.uint32(GOLDEN)
    _mix(salts)
    bits = token_ids.astype(np.uint32)
    bits *= np.uint32(GOLDEN)
    bits ^= hashes[row]
    _mix(bits)
    bits ^= salts[row]
    _mix(bits)
    bits >>= np.uint32(9)
    return bits.astype(np.float32) * np.float32(2.0**-23) + np.float32(2.0**-24)


def _mix(h: Words) -> None:
    """murmur3's fmix32, in place."""
    first, second = MIX_FACTORS
    h ^= h >> np.uint32(16)
    h *= np.uint32(first)
    h ^= h >> np.uint32(13)
    h *= np.uint32(second)
    h ^= h >> np.uint32(16)


def _log(x: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = torch.from_numpy(x).log().numpy()
    return found
