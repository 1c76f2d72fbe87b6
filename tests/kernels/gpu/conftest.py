"""The Triton kernels compared with their references: interpreted on a CPU, compiled on a GPU.

    TRITON_INTERPRET=1 pytest tests/kernels/gpu      small shapes, FP32; with -m long FP16
    pytest tests/kernels/gpu -m gpu                  real shapes and BF16, on CUDA
    pytest tests/kernels/gpu/test_first.py -m first  a few of them, each kernel once

Without either they cannot run, and are not collected.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.device import IS_INTERPRETED, has_triton_device
from tests.kernels.support.interpreter import (
    patch_once_per_launch,
    skip_unused_work,
    sum_dots_in_order,
)

if IS_INTERPRETED:
    patch_once_per_launch()
    skip_unused_work()
    sum_dots_in_order()
HERE = Path(__file__).parent
DTYPES = [torch.float32, torch.float16] + ([] if IS_INTERPRETED else [torch.bfloat16])


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if has_triton_device() else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter takes seconds for a case: one of a grid, in FP32, in every run; FP16 and all
    others in long runs.
    """
    is_here = {path: HERE in path.parents for path in {item.path for item in items}}
    for item in items:
        if not is_here[item.path]:
            continue
        call = getattr(item, "callspec", None)
        if not IS_INTERPRETED:
            item.add_marker(pytest.mark.gpu)
        elif call is not None and call.params.get("dtype") is torch.float16:
            item.add_marker(pytest.mark.long)
        elif item.get_closest_marker("each_value") is None:
            item.add_marker(pytest.mark.each_value(1))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The interpreter computes BF16 wrongly, without an error."""
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes contexts of several segments short enough for the slow interpreter."""
    if IS_INTERPRETED:
        monkeypatch.setattr("kernels.gpu.attention.prefill_attention.SEGMENT", 128)
        monkeypatch.setattr("kernels.gpu.attention.decode_attention.SEGMENT", 128)
