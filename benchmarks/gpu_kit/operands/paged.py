"""A paged cache of one layer with the contexts of a batch; no two adjacent blocks are in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_kit.operands.columns import INT32, integers
from benchmarks.gpu_kit.session import Session

LATENT, ROTATED = 512, 64  # elements of DeepSeek-V2's cached row
LATENT_SCALE = (128 + ROTATED) ** -0.5


@dataclass(frozen=True)
class Paged:
    cache: Tensor  # [planes, num_blocks, kv_heads, block_size, head_dim]
    tables: Tensor  # [S, max_blocks] int32, as of a step on CUDA
    lens: Tensor  # [S]

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.cache, self.tables, self.lens


def paged(
    session: Session,
    lens: Sequence[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    planes: int = 2,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> Paged:
    """Returns a paged cache of the model's heads, or of given ones. Sequences share no block."""
    shapes = session.shapes
    width = -(-max(lens) // shapes.block_size)
    num_blocks = width * len(lens)
    shape = (kv_heads or shapes.kv_heads, shapes.block_size, head_dim or shapes.head_dim)
    tables = torch.arange(num_blocks, dtype=INT32, device=session.device).flip(0)
    return Paged(
        session.random(planes, num_blocks, *shape, dtype=dtype, seed=3),
        tables.view(len(lens), width),
        integers(session, lens),
    )


def latents(session: Session, lens: Sequence[int]) -> Paged:
    return paged(session, lens, planes=1, kv_heads=1, head_dim=LATENT + ROTATED)
