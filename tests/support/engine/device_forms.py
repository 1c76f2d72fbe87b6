"""Models on CPU tensors in the forms that they have on a device."""

from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.split_weight import split_weight
from shared.engine.layers import router
from shared.engine.weights import weight_regions


def use_device_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are not packed for the compiled loops, which hold addresses; they are split where
    they are compressed; all memory is torch's.
    """
    monkeypatch.setattr(ops, "_is_for_loops", lambda _: False)
    monkeypatch.setattr(router, "_zeros", lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    monkeypatch.setattr(weight_regions, "compress_weight", split_weight)
