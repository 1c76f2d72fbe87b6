"""Cuts a batch's new tokens into runs, the unit in which attention is computed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.compile import compiled


@compiled()
def runs_of(query_lens: Any, context_lens: Any, max_tokens: int) -> Any:
    """[n, 4]: sequence, first row and end row (exclusive) in the flat batch, first position."""
    num_runs = 0  # counted by a loop: numba's `sum` compiles code for its error texts
    for query_len in query_lens:
        num_runs += (query_len + max_tokens - 1) // max_tokens
    runs = np.empty((num_runs, 4), np.int64)
    run, row = 0, 0
    for seq in range(len(query_lens)):
        end = row + query_lens[seq]
        shift = context_lens[seq] - end
        for low in range(row, end, max_tokens):
            runs[run, 0] = seq  # one by one: numba's assignment of a row compiles error texts, 2 s
            runs[run, 1] = low
            runs[run, 2] = min(low + max_tokens, end)
            runs[run, 3] = low + shift
            run += 1
        row = end
    return runs
