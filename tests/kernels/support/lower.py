"""The lower bounds of attention for a window or chunks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shared.engine.layers.attention_inputs import lower_bounds
from shared.kv_layout import Reach


def lower_of(
    reach: Reach, query_lens: Iterable[int], context_lens: Iterable[int], device: torch.device
) -> Tensor | None:
    """[T] of the last `query_lens` tokens of each context."""
    runs = [
        torch.arange(context - query, context)
        for query, context in zip(query_lens, context_lens, strict=True)
    ]
    bounds = lower_bounds(reach, torch.cat(runs).numpy())
    return None if bounds is None else torch.from_numpy(bounds).clamp(min=0).to(device)
