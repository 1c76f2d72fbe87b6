"""A row of the library's products does not depend on the number of rows, at each of its levels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu.gemm.linear import library_linear, pack_for_library

ROOT = Path(__file__).parents[4]
# Sizes for which levels were found to choose other kernels: by one row, by many, by an odd K.
SHAPES = ((1024, 768), (192, 4096), (60, 100), (2717, 799))
NUM_ROWS = (1, 2, 3, 7, 16, 33, 64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEVELS = (
    "ALL",
    *(pytest.param(n, marks=pytest.mark.long) for n in ("AVX2", "AVX512_CORE", "AVX512_CORE_BF16")),
)


def rows_that_differ() -> list[str]:
    found = []
    for n, k in SHAPES:
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(n * k)
            weight = torch.randn(n, k, generator=generator).to(dtype)
            x = torch.randn(130, k, generator=generator).to(dtype)
            packed = pack_for_library(weight)
            together = library_linear(x, packed)
            found += [
                f"{n} x {k}, {dtype}, {num_rows} rows"
                for num_rows in NUM_ROWS
                if not torch.equal(library_linear(x[:num_rows], packed), together[:num_rows])
            ]
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_library_is_row_invariant(level: str) -> None:
    """In a process whose compiled loops have no vectors, so that the library's level counts."""
    environ = {"ONEDNN_MAX_CPU_ISA": level, "NUMBA_CPU_NAME": "generic", "OMP_NUM_THREADS": "1"}
    code = "from tests.kernels.cpu.gemm.test_library_rows import *; print(rows_that_differ())"
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.stdout.strip() == "[]", child.stdout + child.stderr[-1000:]
