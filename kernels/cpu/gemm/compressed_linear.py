"""y = x · weightᵀ + bias with a compressed weight: bit-identical to `linear` with the dense one.

Where this package has BF16 products, see compressed_gemm.py. Elsewhere a part of the weight's rows
is decoded, and the library multiplies by it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.check_tensor import expect
from kernels.cpu.codec.bf16_codec import BLOCK
from kernels.cpu.gemm.compressed_weight import CompressedWeight
from kernels.cpu.gemm.decompress_rows import decode_strips
from kernels.cpu.gemm.linear import linear
from kernels.cpu.gemm.packed_linear import for_products, packed_linear

# The library splits K among threads if a product has few columns: a part of a weight needs this
# many rows per thread to give the bits of the full weight (measured: 1 and 2 threads, K <= 14,336).
THREAD_ROWS = 128
MIN_PIECE_ROWS = 256


def compressed_linear(
    x: Tensor,
    weight: CompressedWeight,
    bias: Tensor | None = None,
    *,
    is_batch_invariant: bool = False,
) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N], all BF16. A row does not depend on their number.

    Raises BadTensor.
    """
    expect("x", x, (None, weight.shape[1]), dtype=torch.bfloat16, device=weight.memory.device)
    planes = for_products(weight)
    y = _by_pieces(x, weight) if planes is None else packed_linear(x, planes)
    return y if bias is None else y.add_(bias)


def _by_pieces(x: Tensor, weight: CompressedWeight) -> Tensor:
    num_rows, width = weight.shape
    num_strips = len(weight.planes.bases)
    piece_rows = max(THREAD_ROWS * torch.get_num_threads(), MIN_PIECE_ROWS)
    num_pieces = max(num_rows // piece_rows, 1)
    ends = [num_strips * (piece + 1) // num_pieces for piece in range(num_pieces)]
    largest = max(end - first for first, end in zip([0, *ends], ends, strict=False))
    scratch = x.new_empty(largest * BLOCK, width)
    y = x.new_empty(len(x), num_rows)
    for first, end in zip([0, *ends], ends, strict=False):
        low, high = first * BLOCK, min(end * BLOCK, num_rows)
        decode_strips(weight, first, end, scratch)
        y[:, low:high] = linear(x, scratch[: high - low])
    return y
