"""One launch of each Triton kernel that the engine launches, with inputs of a small model.

For kernel analysis tools, and for a dry run: `python -m benchmarks.gpu_kit.launches [NAME ...]`
launches on CUDA. Under a fake driver tensors are on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 2, 128, 16
NUM_BLOCKS, VOCAB = 160, 4100
CONTEXT = 1100  # more than one segment


@dataclass(frozen=True)
class Inputs:
    device: torch.device
    num_rows: int = 17

    def random(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=F32).to(dtype)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=dtype)

    def cache(self) -> Tensor:
        return self.random(2, NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM)

    def tables(self, num_seqs: int) -> Tensor:
        width = -(-CONTEXT // BLOCK_SIZE)
        draw = torch.randint(NUM_BLOCKS, (num_seqs, width), device=self.device)
        return draw.to(I32)


def rms_norm(inputs: Inputs) -> None:
    from kernels.gpu.rows.add_rms_norm import add_rms_norm
    from kernels.gpu.rows.rms_norm import rms_norm as norm

    x, weight = inputs.random(inputs.num_rows, 2048), inputs.random(2048)
    norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5)


def gates(inputs: Inputs) -> None:
    from kernels.gpu.rows.gelu_and_mul import gelu_and_mul
    from kernels.gpu.rows.silu_and_mul import silu_and_mul

    gate_up = inputs.random(inputs.num_rows, 2 * 1376)
    silu_and_mul(gate_up)
    gelu_and_mul(gate_up)


def rotate_and_store(inputs: Inputs) -> None:
    from kernels.gpu.kv.rotate_and_store import rotate_and_store as launch

    heads = inputs.random(inputs.num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
    angles = inputs.random(inputs.num_rows, HEAD_DIM // 2, dtype=F32)
    slots = torch.arange(inputs.num_rows, device=inputs.device)
    launch(heads, angles, angles, inputs.cache(), slots)


def linear(inputs: Inputs) -> None:
    from kernels.gpu.gemm.linear import linear as launch

    for is_batch_invariant in (False, True):
        x, weight = inputs.random(inputs.num_rows, 1024), inputs.random(640, 1024)
        launch(x, weight, is_batch_invariant=is_batch_invariant)


def compressed_linear(inputs: Inputs) -> None:
    from kernels.gpu.gemm.compressed_linear import compressed_linear as launch
    from kernels.gpu.gemm.decompress import decompress
    from kernels.split_weight import split_weight

    split = split_weight(inputs.random(640, 1024) * 0.02, is_always=True)
    assert split is not None
    launch(inputs.random(inputs.num_rows, 1024), split, is_batch_invariant=True)
    decompress(split)


def decode_attention(inputs: Inputs) -> None:
    from kernels.gpu.attention.decode_attention import decode_attention as launch

    num_seqs = inputs.num_rows
    lens = torch.full((num_seqs,), CONTEXT, device=inputs.device, dtype=I32)
    for is_batch_invariant in (False, True):
        query = inputs.random(num_seqs, HEADS, HEAD_DIM)
        tables, exact = inputs.tables(num_seqs), is_batch_invariant
        launch(query, inputs.cache(), tables, lens, 0.1, is_batch_invariant=exact)


def prefill_attention(inputs: Inputs) -> None:
    from kernels.gpu.attention.prefill_attention import prefill_attention as launch

    starts = torch.tensor([0, 5, 150], device=inputs.device, dtype=I32)
    lens = torch.tensor([CONTEXT, 200], device=inputs.device, dtype=I32)
    for is_batch_invariant in (False, True):
        query = inputs.random(150, HEADS, HEAD_DIM)
        tables, exact = inputs.tables(2), is_batch_invariant
        launch(query, inputs.cache(), tables, starts, lens, 0.1, is_batch_invariant=exact)


def move_blocks(inputs: Inputs) -> None:
    from kernels.gpu.kv.copy_blocks import copy_blocks
    from kernels.gpu.kv.gather_blocks import gather_blocks
    from kernels.gpu.kv.scatter_blocks import scatter_blocks

    cache = torch.stack([inputs.cache(), inputs.cache()])
    ids = torch.arange(10, device=inputs.device)
    copy_blocks(cache, ids[:3], ids[5:8])
    payload = inputs.random(2, 2, 70, KV_HEADS, HEAD_DIM)
    for move in (gather_blocks, scatter_blocks):
        move(cache, ids, 5, 70, payload, checksum=inputs.zeros(1, dtype=I64))


def sample(inputs: Inputs) -> None:
    from kernels.gpu.sampling.apply_token_mask import apply_token_mask
    from kernels.gpu.sampling.penalize import penalize
    from kernels.gpu.sampling.sample import sample as launch
    from kernels.gpu.sampling.top_k import top_k

    rows = inputs.num_rows
    logits = inputs.random(rows, VOCAB, dtype=F32)
    floats, zeros = torch.full((rows,), 0.9, device=inputs.device), inputs.zeros(rows, dtype=I64)
    launch(logits, floats, zeros + 20, floats, inputs.zeros(rows, dtype=F32), zeros, zeros, zeros)
    top_k(logits, 20)
    every_row = torch.arange(rows, device=inputs.device)
    penalize(logits, every_row, zeros, floats, floats)
    apply_token_mask(logits, every_row, inputs.zeros(rows, -(-VOCAB // 32), dtype=torch.int32))


LAUNCHES: dict[str, Callable[[Inputs], None]] = {
    launch.__name__: launch
    for launch in (
        *(rms_norm, gates, rotate_and_store, linear, compressed_linear),
        *(decode_attention, prefill_attention, move_blocks, sample),
    )
}


def main(names: list[str]) -> None:
    for name in names or LAUNCHES:
        LAUNCHES[name](Inputs(torch.device("cuda")))
        torch.cuda.synchronize()
        print(f"launched {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
