"""The softmax of both attention kernels, a row at a time and in pieces of a row.

A row's sum runs in LANES interleaved chains over absolute positions, so that cutting the row at
multiples of LANES, or adding masked keys, changes no bit. Rows are named by index: a slice of an
array costs as much as dozens of its elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.compiled import compiled
from kernels.cpu.lanes import LANES, LOG2_E, exp2, largest_lane, tanh

_f32 = np.float32


@compiled()
def largest_score(scores: Any, row: int, start: int, end: int, softcap: Any) -> Any:
    """The largest of a row's scores [start, end), which are capped on the way; -inf for none.

    scores [R, pieces, LANES]: a row lies in one piece. Those outside of [start, end) become -inf.
    Without a soft cap (0) they carry a factor LOG2_E, with one they get it here.
    """
    _mask(scores, row, 0, start)
    _mask(scores, row, end, scores.shape[1] * LANES)
    if softcap > _f32(0.0):
        for j in range(start, end):
            x = scores[row, j // LANES, j % LANES]
            scores[row, j // LANES, j % LANES] = softcap * tanh(x / softcap) * _f32(LOG2_E)
    top = _f32(-np.inf)
    for piece in range(start // LANES, (end + LANES - 1) // LANES):
        top = max(top, largest_lane(_address(scores, row, piece)))
    return top


@compiled()
def weigh_scores(
    scores: Any, row: int, start: int, end: int, top: Any, sums: Any, index: int
) -> None:
    """Turns a row's scores into weights 2**(score - top), those outside of [start, end) into 0, and
    adds them to the chains sums[index], [..., LANES].

    `largest_score` has been there before.
    """
    first, last = start // LANES, (end + LANES - 1) // LANES
    if end <= start:
        first = last = 0
    for piece in range(scores.shape[1]):
        if piece < first or piece >= last:
            for lane in range(LANES):
                scores[row, piece, lane] = _f32(0.0)
        else:
            for lane in range(LANES):
                scores[row, piece, lane] = exp2(scores[row, piece, lane] - top)
            for lane in range(LANES):
                sums[index, lane] += scores[row, piece, lane]


@compiled()
def _mask(scores: Any, row: int, start: int, end: int) -> None:
    for j in range(start, end):
        scores[row, j // LANES, j % LANES] = -np.inf


@compiled()
def _address(scores: Any, row: int, piece: int) -> Any:
    return scores.ctypes.data + (row * scores.shape[1] + piece) * LANES * scores.itemsize
