"""A session whose tensors are on the CPU, where torch computes: for the logic of parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_kit.session import Row, Session, read_rows
from benchmarks.gpu_kit.shapes import SMALL, Shapes


@dataclass
class OnCpu(Session):
    """`took_s`: what every call takes. `is_lost`: the device answers nothing any more."""

    took_s: float = 1e-3
    is_lost: bool = False

    @property
    def shapes(self) -> Shapes:
        return SMALL

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def seconds(self, call: object, repetitions: int = 20) -> float:
        call()  # type: ignore[operator]
        return self.took_s

    def synchronize(self) -> None:
        if self.is_lost:
            raise RuntimeError("an illegal memory access was encountered")

    @property
    def rows(self) -> list[Row]:
        return read_rows(self.rows_file) if self.rows_file.exists() else []


def session_in(folder: Path) -> OnCpu:
    return OnCpu("part", folder / "rows.jsonl", card="NVIDIA H100 80GB HBM3")
