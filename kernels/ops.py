"""The engine's operations, each by the kernel for its tensors' device: the one place that chooses.

CUDA       Triton: `kernels/gpu/`
CPU        what is compiled for it: `kernels/cpu/`; under Triton's interpreter, Triton
otherwise  PyTorch: `kernels/torch_ops/` and `kernels/reference/`, with shapes and formulas
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from kernels.cpu.attention import decode_attention as cpu_decode_attention
from kernels.cpu.attention import prefill_attention as cpu_prefill_attention
from kernels.cpu.attention import rotate_and_store as cpu_rotate_and_store
from kernels.cpu.gemm import compressed_linear as cpu_compressed_linear
from kernels.cpu.gemm import linear as cpu_linear
from kernels.cpu.gemm.argmax import packed_argmax
from kernels.cpu.gemm.compressed_weight import CompressedWeight
from kernels.cpu.gemm.compressed_weight import compress_weight as cpu_compress_weight
from kernels.cpu.gemm.decompress_rows import select_rows as select_compressed_rows
from kernels.cpu.gemm.packed_linear import for_products, packed_linear
from kernels.cpu.layer import add_rms_norm as cpu_add_rms_norm
from kernels.cpu.layer import gated as cpu_gated
from kernels.cpu.layer import rms_norm as cpu_rms_norm
from kernels.cpu.layer.fused_layer import PackedLayer, packed_layer
from kernels.device import IS_INTERPRETED, has_triton_device
from kernels.reference.add_rms_norm import add_rms_norm as reference_add_rms_norm
from kernels.reference.compressed_linear import compressed_linear as reference_compressed_linear
from kernels.reference.decode_attention import decode_attention as reference_decode_attention
from kernels.reference.decompress import decompress as reference_decompress
from kernels.reference.decompress import select_rows as select_split_rows
from kernels.reference.gelu_and_mul import gelu_and_mul as reference_gelu_and_mul
from kernels.reference.linear import linear as reference_linear
from kernels.reference.prefill_attention import prefill_attention as reference_prefill_attention
from kernels.reference.rms_norm import rms_norm as reference_rms_norm
from kernels.reference.rotate_and_store import rotate_and_store as reference_rotate_and_store
from kernels.reference.silu_and_mul import silu_and_mul as reference_silu_and_mul
from kernels.split_weight import SplitWeight, split_weight
from kernels.torch_ops.copy_blocks import copy_blocks as reference_copy_blocks
from kernels.torch_ops.gather_blocks import gather_blocks as reference_gather_blocks
from kernels.torch_ops.penalize import penalize as reference_penalize
from kernels.torch_ops.sample import argmax
from kernels.torch_ops.sample import sample as reference_sample
from kernels.torch_ops.scatter_blocks import scatter_blocks as reference_scatter_blocks
from kernels.torch_ops.top_k import top_k as reference_top_k

P = ParamSpec("P")
R = TypeVar("R")
Op = Callable[Concatenate[Tensor, P], R]
Compressed = CompressedWeight | SplitWeight
Weight = Tensor | CompressedWeight | SplitWeight
LayerKernel = PackedLayer
layer_kernel = packed_layer
# Where each operation's Triton kernel is, below `kernels/gpu/`.
TRITON_MODULES = {
    "add_rms_norm": "rows.add_rms_norm",
    "copy_blocks": "kv.copy_blocks",
    "decode_attention": "attention.decode_attention",
    "gather_blocks": "kv.gather_blocks",
    "gelu_and_mul": "rows.gelu_and_mul",
    "top_k": "sampling.top_k",
    "linear": "gemm.linear",
    "penalize": "sampling.penalize",
    "prefill_attention": "attention.prefill_attention",
    "rms_norm": "rows.rms_norm",
    "rotate_and_store": "kv.rotate_and_store",
    "sample": "sampling.sample",
    "scatter_blocks": "kv.scatter_blocks",
    "silu_and_mul": "rows.silu_and_mul",
}
HAS_TRITON = has_triton_device()
if HAS_TRITON:
    from kernels.gpu.gemm.compressed_linear import compressed_linear as _fused_linear
    from kernels.gpu.gemm.decompress import decompress as _triton_decompress
    from kernels.gpu.gemm.fused_rows import fused_rows


def _chosen(reference: Op[P, R], on_cpu: Op[P, R] | None = None) -> Op[P, R]:
    """An operation runs where its first tensor is."""
    elsewhere = _on_triton(reference) if HAS_TRITON else reference
    here = elsewhere if IS_INTERPRETED else on_cpu or reference

    def op(first: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        return (here if first.is_cpu else elsewhere)(first, *args, **kwargs)

    return op


def _on_triton(reference: Op[P, R]) -> Op[P, R]:
    name = reference.__name__
    found: Op[P, R] = getattr(import_module(f"kernels.gpu.{TRITON_MODULES[name]}"), name)
    return found


add_rms_norm = _chosen(reference_add_rms_norm, cpu_add_rms_norm.add_rms_norm)
copy_blocks = _chosen(reference_copy_blocks)
decode_attention = _chosen(reference_decode_attention, cpu_decode_attention.decode_attention)
gather_blocks = _chosen(reference_gather_blocks)
gelu_and_mul = _chosen(reference_gelu_and_mul, cpu_gated.gelu_and_mul)
top_k = _chosen(reference_top_k)
penalize = _chosen(reference_penalize)
prefill_attention = _chosen(reference_prefill_attention, cpu_prefill_attention.prefill_attention)
rms_norm = _chosen(reference_rms_norm, cpu_rms_norm.rms_norm)
rotate_and_store = _chosen(reference_rotate_and_store, cpu_rotate_and_store.rotate_and_store)
sample = _chosen(reference_sample)
scatter_blocks = _chosen(reference_scatter_blocks)
silu_and_mul = _chosen(reference_silu_and_mul, cpu_gated.silu_and_mul)
_linear = _chosen(reference_linear, cpu_linear.linear)


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    is_batch_invariant: bool = False,
) -> Tensor:
    """On CUDA the library multiplies, unless a row's bits may not depend on the others."""
    if isinstance(weight, CompressedWeight):
        return cpu_compressed_linear.compressed_linear(x, weight, bias)
    if isinstance(weight, SplitWeight):
        return compressed_linear(x, weight, bias, is_batch_invariant=is_batch_invariant)
    if x.is_cuda and not is_batch_invariant:
        return torch.nn.functional.linear(x, weight, bias)
    return _linear(x, weight, bias, is_batch_invariant=is_batch_invariant)


def logits(x: Tensor, weight: Weight, *, is_batch_invariant: bool = False) -> Tensor:
    """`linear`, its result as FP32."""
    packed = for_products(weight)
    if packed is not None:
        return packed_linear(x, packed, dtype=torch.float32)
    return linear(x, weight, is_batch_invariant=is_batch_invariant).float()


def argmax_logits(x: Tensor, weight: Weight, *, is_batch_invariant: bool = False) -> Tensor:
    """argmax(`logits`), [T] int64; of equal ones the first."""
    packed = for_products(weight)
    if packed is not None:
        return packed_argmax(x, packed)
    return argmax(logits(x, weight, is_batch_invariant=is_batch_invariant))


def select_rows(weight: Weight, row_ids: Tensor) -> Tensor:
    """weight [N, K], row_ids [T] -> [T, K]."""
    if isinstance(weight, CompressedWeight):
        return select_compressed_rows(weight, row_ids)
    if isinstance(weight, SplitWeight):
        return select_split_rows(weight, row_ids)
    return weight.index_select(0, row_ids)


def decompress(weight: SplitWeight, out: Tensor | None = None) -> Tensor:
    """The dense weight of a split one. (A CPU's compressed one is never decoded as a whole.)"""
    is_here = _is_for_triton(weight.device)
    return (_triton_decompress if is_here else reference_decompress)(weight, out)


def compressed_linear(
    x: Tensor, weight: SplitWeight, bias: Tensor | None = None, *, is_batch_invariant: bool = False
) -> Tensor:
    """`linear` with a split weight. Few rows decode it on the way; for many it is decompressed into
    memory that is free again afterwards, where `linear` multiplies: its bits, both ways, in the
    batch-invariant mode.
    """
    if not _is_for_triton(x.device):
        return reference_compressed_linear(x, weight, bias, is_batch_invariant=is_batch_invariant)

    def fused(rows: Tensor) -> Tensor:
        return _fused_linear(rows, weight, bias, is_batch_invariant=is_batch_invariant)

    def dense(rows: Tensor) -> Tensor:
        return linear(rows, decompress(weight), bias, is_batch_invariant=is_batch_invariant)

    mode = "invariant" if is_batch_invariant else "free"
    most = fused_rows(weight.shape, weight.device, mode, fused, dense)
    return fused(x) if len(x) <= most else dense(x)


def _is_for_triton(device: torch.device) -> bool:
    return HAS_TRITON and (IS_INTERPRETED or device.type != "cpu")


def pack_weight(weight: Tensor) -> Tensor:
    """weight [N, K] in the form that `linear` multiplies with."""
    return weight if IS_INTERPRETED else cpu_linear.pack_weight(weight)


def has_custom_gemm(weight: Weight) -> bool:
    """Whether `linear` multiplies by it with a kernel of ours; else torch's library does."""
    return isinstance(weight, SplitWeight) or for_products(weight) is not None


def compress_weight(weight: Tensor) -> Compressed | None:
    """weight [N, K] in a smaller form for `linear` and `select_rows`, bit for bit the same.

    None where there is none: it would save nothing, or the device has no product with it.
    """
    if _is_for_triton(weight.device):
        return split_weight(weight)
    return cpu_compress_weight(weight) if weight.is_cpu else None
