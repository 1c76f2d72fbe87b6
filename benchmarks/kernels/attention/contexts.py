"""A paged cache with the contexts of a batch in blocks of random order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.kernels.timing import random

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 64, 8, 128, 16  # as in Llama-3.1-70B
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True)
class Batch:
    cache: torch.Tensor
    tables: torch.Tensor
    context_lens: torch.Tensor


def batch(num_seqs: int, context_len: int, dtype: torch.dtype = torch.bfloat16) -> Batch:
    num_blocks = context_len // BLOCK_SIZE
    shape = (num_seqs * num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    cache = torch.stack([random(*shape, dtype=dtype), random(*shape, dtype=dtype)])
    order = torch.randperm(num_seqs * num_blocks, device="cuda", dtype=torch.int32)
    lens = torch.full((num_seqs,), context_len, device="cuda", dtype=torch.int32)
    return Batch(cache, order.view(num_seqs, num_blocks), lens)
