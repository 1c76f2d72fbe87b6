"""Random inputs, the same in every run, and outputs in which unwritten elements are detected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def random(*shape: int, like: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns normal numbers from a generator of the device: a host takes seconds for
    a large weight.
    """
    generator = torch.Generator(like).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=like).to(dtype)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fills what a wrapper allocates with NaN, or with -1, so that missing writes are detected."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        return poison(empty(*args, **kwargs))

    def poisoned_like(*args: Any, **kwargs: Any) -> Tensor:
        return poison(empty_like(*args, **kwargs))

    with patch.object(torch, "empty", poisoned), patch.object(torch, "empty_like", poisoned_like):
        yield
