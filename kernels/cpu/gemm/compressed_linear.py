"""y = x · weightᵀ + bias with a compressed weight: bit-identical to `linear` with the dense one.

Where this package has BF16 GEMMs, see compressed_gemm.py. Elsewhere a part of the weight's rows
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
from kernels.cpu.gemm.packed_linear import for_gemm, packed_linear
from kernels.cpu.gemm.row_pieces import row_pieces


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
    planes = for_gemm(weight)
    y = _by_pieces(x, weight) if planes is None else packed_linear(x, planes)
    return y if bias is None else y.add_(bias)


def _by_pieces(x: Tensor, weight: CompressedWeight) -> Tensor:
    num_rows, width = weight.shape
    pieces = row_pieces(num_rows)
    scratch = x.new_empty(max(end - first for first, end in pieces) * BLOCK, width)
    y = x.new_empty(len(x), num_rows)
    for first, end in pieces:
        low, high = first * BLOCK, min(end * BLOCK, num_rows)
        decode_strips(weight, first, end, scratch)
        y[:, low:high] = linear(x, scratch[: high - low])
    return y
