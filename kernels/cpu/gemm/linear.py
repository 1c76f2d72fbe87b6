"""y = x · weightᵀ + bias, where an output row does not depend on the number of rows.

On a CPU a weight is packed once. Weights of full blocks of 32, in BF16 with AMX or AVX-512 BF16 and
in FP32 with AVX-512, use `packed_linear`. FP32 takes 0.3 to 0.9 of oneDNN's time for one row, about
the same for 64, and 1.0 to 1.3 of it for 1,000 (a Xeon, one thread, N and K from 256 to 4,096);
BF16 without AMX takes 0.5 to 0.9 for one row, and 0.9 to 1.1 for 16 and more (an EPYC, one thread,
N up to 32,000).

Others are packed into oneDNN's blocked layout; otherwise every GEMM rearranges the full weight
first. Measured on an EPYC with AVX-512 BF16, 768 x 4096: 2.3 times as fast for one row and 1.6
times for 64 in BF16. A row's bits are the same for any number of rows from two on and any number of
threads, and for a single row if K <= SPLIT_K (measured, K up to 11,008): above it, one row uses
another kernel, so it is computed together with a row of zeros. Unpacked weights need more care.
With AMX oneDNN cuts K by the number of rows, in one way for two to AMX_ROWS of them (measured on a
Xeon, same K), so more rows are computed in chunks.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels.cpu.gemm.avx512_fp32_gemm import can_pack_floats, pack_floats
from kernels.cpu.gemm.bf16_gemm import can_pack_bf16, pack_bf16
from kernels.cpu.gemm.packed_linear import is_packed_for_gemm, packed_linear
from kernels.cpu.simd.intrinsics import array
from kernels.cpu.simd.library_level import has_amx_gemm, has_bf16_gemm

SPLIT_K = 1024
# Unpacked weights: below PLAIN_ROWS rows are padded to a multiple; above, any count is valid.
PLAIN_ROWS = 16
PLAIN_MULTIPLE = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 16}
AMX_ROWS = 32
PACKABLE = (torch.float32, torch.bfloat16)


def pack_weight(weight: Tensor) -> Tensor:
    """weight [N, K] -> the weight in this package's or oneDNN's layout, or unchanged.

    A packed weight takes the same number of bytes and is valid for `linear` only; an already packed
    weight is returned unchanged.
    """
    if is_packed(weight):
        return weight
    if can_pack_bf16(weight):
        return pack_bf16(weight)
    if can_pack_floats(weight):
        return pack_floats(weight)
    return pack_for_library(weight)


def pack_for_library(weight: Tensor) -> Tensor:
    """weight [N, K] -> the weight in oneDNN's layout, or unchanged. Needs no compiled loops."""
    if weight.is_mkldnn:
        return weight
    if weight.device.type != "cpu" or not library_packs(weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


@cache
def library_packs(dtype: torch.dtype) -> bool:
    """Tries it, as torch refuses BF16 where oneDNN has no AVX-512."""
    if dtype not in PACKABLE or not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(1, 1, dtype=dtype), None)
    except RuntimeError:
        return False
    return True


def is_packed(weight: Tensor) -> bool:
    return weight.is_mkldnn or is_packed_for_gemm(weight)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, is_batch_invariant: bool = False
) -> Tensor:
    """x [T, K], weight [N, K] unpacked or packed, bias [N] -> [T, N] in the dtype of x.

    The bias is added after the product is rounded: fusing it changes the kernel that runs.
    A row does not depend on the number of rows, with or without `is_batch_invariant`.
    """
    if is_packed_for_gemm(weight):
        y = packed_linear(x, array(weight))
    else:
        y = library_linear(x, weight)
    return y if bias is None else y.add_(bias)


def library_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The GEMM with a weight that is not packed, or packed for the library."""
    if x.shape[0] > AMX_ROWS and _is_on_amx(weight):
        return torch.cat([_product(rows, weight) for rows in x.split(AMX_ROWS)])
    return _product(x, weight)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    num_rows = x.shape[0]
    num_padded = _padded_rows(num_rows, weight)
    if num_padded != num_rows:
        x = torch.nn.functional.pad(x, (0, 0, 0, num_padded - num_rows))
    if weight.is_mkldnn:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    else:
        y = torch.nn.functional.linear(x, weight)
    return y[:num_rows]


def _is_on_amx(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and has_amx_gemm()


def _has_kernel_for_one_row(weight: Tensor) -> bool:
    """BF16 without instructions for it: measured with a Xeon limited to avx512_core."""
    is_emulated = weight.dtype == torch.bfloat16 and not has_bf16_gemm()
    return weight.shape[1] > SPLIT_K or is_emulated or _is_on_amx(weight)


def _padded_rows(num_rows: int, weight: Tensor) -> int:
    if weight.is_mkldnn:
        return 2 if num_rows == 1 and _has_kernel_for_one_row(weight) else num_rows
    if num_rows >= PLAIN_ROWS:
        return num_rows
    multiple = PLAIN_MULTIPLE[weight.dtype]
    return -(-num_rows // multiple) * multiple
