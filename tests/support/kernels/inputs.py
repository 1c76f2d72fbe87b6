"""Random inputs, the same in every run, and outputs in which unwritten elements are detected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

        return made

    with ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            stack.enter_context(patch.object(owner, name, poisoned(getattr(owner, name))))
        yield
