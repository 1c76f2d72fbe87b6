"""Runs of tokens that move between the paged cache and the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.kv.paged import FP8
from benchmarks.kernels.timing import by_bandwidth, random


@dataclass(frozen=True)
class Case:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_tokens: int
    dtype: torch.dtype = torch.bfloat16
    has_checksum: bool = False

    def __str__(self) -> str:
        shape = f"{self.num_tokens} tokens of {self.num_layers} x 2 x {self.num_kv_heads}"
        kind = f"{shape} x {self.head_dim} in blocks of {self.block_size}, {self.dtype}"
        return f"{kind}, checksum" if self.has_checksum else kind


CASES = (
    Case(32, 8, 128, 16, 2048),  # Llama 3.1 8B: 256 MiB
    Case(32, 8, 128, 16, 2048, has_checksum=True),
    Case(32, 8, 128, 64, 2048, has_checksum=True),
    Case(32, 8, 128, 16, 4096, FP8, has_checksum=True),
    Case(80, 1, 128, 16, 8192, has_checksum=True),  # 70B on eight GPUs
    Case(32, 8, 80, 16, 4096, has_checksum=True),
)


@dataclass(frozen=True)
class Run:
    case: Case
    kv_cache: Tensor
    block_table: Tensor
    payload: Tensor

    @classmethod
    def of(cls, case: Case) -> Run:
        num_blocks = -(-case.num_tokens // case.block_size)
        planes = (case.num_layers, 2)
        cache = random(*planes, num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
        payload = random(*planes, case.num_tokens, case.num_kv_heads, case.head_dim)
        table = torch.randperm(num_blocks, device="cuda")
        return cls(case, cache.to(case.dtype), table, payload.to(case.dtype))

    def row(self, move: Callable[..., None]) -> dict[str, Any]:
        checksum = None
        if self.case.has_checksum:
            checksum = torch.zeros(1, dtype=torch.int64, device="cuda")
        return by_bandwidth(
            str(self.case),
            lambda: move(
                *(self.kv_cache, self.block_table, 0, self.case.num_tokens, self.payload),
                checksum=checksum,
            ),
            2 * self.payload.nbytes,
        )
