"""The softmax of both attention kernels, a row at a time and in pieces of a row.

A row's sum runs in LANES interleaved chains over absolute positions, so that cutting the row at
multiples of LANES, or adding masked keys, changes no bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.compiled import compiled
from kernels.cpu.lanes import LANES, LOG2_E, exp2, tanh

_f32 = np.float32


@compiled()
def largest_score(scores: Any, start: int, end: int, softcap: Any) -> Any:
    """The largest of scores [start, end), which are capped on the way; -inf if there is none.

    `scores` hold a whole number of LANES. Without a soft cap (0) they carry a factor LOG2_E, with
    one they get it here.
    """
    if softcap > _f32(0.0):
        for j in range(start, end):
            scores[j] = softcap * tanh(scores[j] / softcap) * _f32(LOG2_E)
    for j in range(start):
        scores[j] = -np.inf
    for j in range(end, scores.shape[0]):
        scores[j] = -np.inf
    largest = np.full(LANES, -np.inf, _f32)
    pieces = scores.reshape((-1, LANES))
    for piece in range(pieces.shape[0]):
        for lane in range(LANES):
            x = pieces[piece, lane]
            largest[lane] = x if x > largest[lane] else largest[lane]
    top = largest[0]
    for lane in range(1, LANES):
        top = max(top, largest[lane])
    return top


@compiled()
def weigh_scores(scores: Any, start: int, end: int, top: Any, sums: Any) -> None:
    """Turns scores into weights 2**(score - top), those outside of [start, end) into 0, and adds
    them to the chains `sums` [LANES].
    """
    if end <= start:
        scores[:] = _f32(0.0)
        return
    pieces = scores.reshape((-1, LANES))
    for piece in range(pieces.shape[0]):
        for lane in range(LANES):
            pieces[piece, lane] = exp2(pieces[piece, lane] - top)
        for lane in range(LANES):
            sums[lane] += pieces[piece, lane]
