"""How a batch's new tokens are cut into runs that are attended to together."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor


def runs_of(query_lens: Tensor, context_lens: Tensor, max_tokens: int) -> Any:
    """[n, 4]: sequence, first row and row after the last one in the flat batch, first position."""
    lens, ends = query_lens.numpy(), np.cumsum(query_lens.numpy())
    if (lens == 1).all():
        order = np.arange(len(lens))
        return np.stack((order, order, order + 1, context_lens.numpy() - 1), axis=1)
    runs = []
    for seq, (num_rows, end) in enumerate(zip(lens.tolist(), ends.tolist(), strict=True)):
        shift = int(context_lens[seq]) - end
        for low in range(end - num_rows, end, max_tokens):
            runs.append((seq, low, min(low + max_tokens, end), low + shift))
    return np.array(runs).reshape(-1, 4)
