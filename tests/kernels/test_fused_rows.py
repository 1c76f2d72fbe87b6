from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu.gemm.fused_rows import DEFAULT, NUM_ROWS, FusedRows, fused_rows, max_fused_rows


@pytest.mark.parametrize("limit", [0, 16, 100, 5000])
def test_max_fused_rows_is_the_last_faster_number(limit: int) -> None:
    measured = []

    def is_fused_faster(num_rows: int) -> bool:
        measured.append(num_rows)
        return num_rows <= limit

    assert max_fused_rows(is_fused_faster) == max((n for n in NUM_ROWS if n <= limit), default=0)
    assert len(measured) == min(len(NUM_ROWS), sum(n <= limit for n in NUM_ROWS) + 1)


def test_measurement_is_stored_and_reused(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "fused_rows.json"
    assert FusedRows(path).of("a", lambda: 64) == 64
    other = FusedRows(path)
    assert other.of("a", lambda: 1 // 0) == 64
    assert FusedRows(path).of("b", lambda: 32) == 32
    assert other.of("c", lambda: 16) == 16  # has not read b, and preserves it
    assert json.loads(path.read_text()) == {"a": 64, "b": 32, "c": 16}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": "x"}'])
def test_damaged_file_is_measured_again(content: str, tmp_path: Path) -> None:
    path = tmp_path / "fused_rows.json"
    path.write_text(content)
    assert FusedRows(path).of("a", lambda: 64) == 64
    assert FusedRows(path).of("a", lambda: 1 // 0) == 64


def test_unwritable_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert FusedRows(tmp_path / "file" / "fused_rows.json").of("a", lambda: 64) == 64


def test_nothing_is_measured_without_cuda() -> None:
    def never(x: torch.Tensor) -> None:
        raise AssertionError

    assert fused_rows((64, 64), torch.device("cpu"), "free", never, never) == DEFAULT
