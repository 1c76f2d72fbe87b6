"""A dry run with an 8B model's sizes takes neither its memory nor the time of its products."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_kit.dry.dry_tensors import lazy_memory, library_products
from kernels import ops

NUM_BYTES = 1 << 30


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("name", ["zeros", "empty"])
def test_memory_is_taken_when_it_is_touched(name: str) -> None:
    before = resident_bytes()
    with lazy_memory():
        found = getattr(torch, name)(NUM_BYTES // 2048, 1024, dtype=torch.bfloat16)
    assert resident_bytes() - before < NUM_BYTES // 8
    assert (found.shape, found.dtype) == ((NUM_BYTES // 2048, 1024), torch.bfloat16)
    assert not found[-1].any()


def test_other_devices_and_sizes_are_untouched() -> None:
    with lazy_memory():
        assert torch.empty(3, device="meta").is_meta
        assert torch.zeros((2, 0)).shape == (2, 0)
        assert torch.empty(4).dtype == torch.float32
        assert torch.zeros(()).shape == ()


def test_fast_products_are_the_library_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which returns zeros here; those of the exact mode are Hearth's own."""
    own = torch.full((3, 5), 7.0)
    monkeypatch.setattr(ops, "_linear", lambda *_, **__: own)
    x, weight = torch.ones(3, 32), torch.ones(5, 32)
    with library_products():
        assert torch.equal(ops.linear(x, weight), torch.zeros(3, 5))
        assert ops.linear(x, weight, is_batch_invariant=True) is own
    assert ops.linear(x, weight) is own  # no tensor is on CUDA
