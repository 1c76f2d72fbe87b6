"""Paged caches in the state of a fleet that has run for a while: tokens and sequences have their
blocks in random order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.timing import random

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
BLOCK_SIZE = 16


def layer_cache(num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Returns the cache of one layer."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    return random(2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim).to(dtype)


def scattered_slots(num_tokens: int) -> Tensor:
    """Returns slots of consecutive tokens in blocks in random order."""
    blocks = torch.randperm(-(-num_tokens // BLOCK_SIZE), device="cuda")
    slots = blocks.unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device="cuda")
    return slots.view(-1)[:num_tokens]


def scales(num_kv_heads: int) -> Tensor:
    return torch.rand(2, num_kv_heads, device="cuda") + 0.01


def angles(num_tokens: int, half: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [num_tokens, half] FP32 each."""
    turned = random(num_tokens, half, dtype=torch.float32)
    return turned.cos(), turned.sin()


@dataclass(frozen=True)
class RunShape:
    """A run of tokens that moves between the paged cache and the wire."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_tokens: int
    dtype: torch.dtype = BF16

    def __str__(self) -> str:
        shape = f"{self.num_tokens} tokens of {self.num_layers} x 2 x {self.num_kv_heads}"
        return f"{shape} x {self.head_dim} in blocks of {self.block_size}, {self.dtype}"


RUNS = (
    RunShape(32, 8, 128, 16, 2048),  # Llama 3.1 8B: 256 MiB
    RunShape(32, 8, 128, 64, 2048),
    RunShape(32, 8, 128, 16, 4096, FP8),
    RunShape(80, 1, 128, 16, 8192),  # 70B on eight GPUs
    RunShape(32, 8, 80, 16, 4096),
)


@dataclass(frozen=True)
class Run:
    num_tokens: int
    kv_cache: Tensor
    block_table: Tensor
    payload: Tensor

    @classmethod
    def of(cls, shape: RunShape) -> Run:
        num_blocks = -(-shape.num_tokens // shape.block_size)
        planes = (shape.num_layers, 2)
        cache = random(*planes, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        payload = random(*planes, shape.num_tokens, shape.num_kv_heads, shape.head_dim)
        table = torch.randperm(num_blocks, device="cuda")
        return cls(shape.num_tokens, cache.to(shape.dtype), table, payload.to(shape.dtype))

    def move(self, kernel: Callable[..., None]) -> None:
        kernel(self.kv_cache, self.block_table, 0, self.num_tokens, self.payload)
