"""Memory that is never touched takes no room."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from tests.support.kernels.untouched import untouched_zeros

GIB = 1 << 30

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_large_tensor_takes_no_memory() -> None:
    before = resident_bytes()
    large = untouched_zeros(64, GIB // 2, dtype=torch.bfloat16)
    assert large[[0, 31, 63], -1].tolist() == [0, 0, 0]
    large[5, 7] = 1
    assert (large[5, 7], large[5, 8]) == (1, 0)
    assert resident_bytes() - before < GIB


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (1 << 20, 2)])
def test_is_like_zeros(shape: tuple[int, ...]) -> None:
    for found in (untouched_zeros(shape), untouched_zeros(*shape), untouched_zeros(list(shape))):
        assert torch.equal(found, torch.zeros(shape))
    assert untouched_zeros(*shape, dtype=torch.int64).dtype == torch.int64
    assert untouched_zeros(*shape, device="meta").device.type == "meta"
