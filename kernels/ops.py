"""The engine's operations: chooses the kernel of each by the device of its tensors.

CUDA       Triton: `kernels/gpu/`
CPU        compiled loops: `kernels/cpu/`; under Triton's interpreter, Triton
otherwise  PyTorch: `kernels/torch_ops/` and `kernels/reference/`, with shapes and formulas

PyTorch also computes operations without compiled loops on CPUs, and everything on a host that
cannot compile. `kernels/cpu/`, and numba with it, is imported with the first tensor on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from importlib import import_module
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypeAlias,
    TypeGuard,
    TypeVar,
)

import torch
from torch import Tensor

from kernels.device import IS_INTERPRETED, has_triton_device
from kernels.quantized_weight import Code as Code
from kernels.quantized_weight import Fp8Layout as Fp8Layout
from kernels.quantized_weight import GroupedLayout as GroupedLayout
from kernels.quantized_weight import QuantizedWeight
from kernels.reference.add_rms_norm import add_rms_norm as reference_add_rms_norm
from kernels.reference.compressed_linear import compressed_linear as reference_compressed_linear
from kernels.reference.decode_attention import decode_attention as reference_decode_attention
from kernels.reference.decompress import decompress as reference_decompress
from kernels.reference.gated import clamped_gate as reference_clamped_gate
from kernels.reference.gated import gelu_and_mul as reference_gelu_and_mul
from kernels.reference.gated import silu_and_mul as reference_silu_and_mul
from kernels.reference.grouped_linear import expert_mlp as reference_expert_mlp
from kernels.reference.grouped_linear import grouped_linear as reference_grouped_linear
from kernels.reference.grouped_linear import grouped_sums as reference_grouped_sums
from kernels.reference.lane_linear import lane_linear as reference_lane_linear
from kernels.reference.lane_linear import lane_sums as reference_lane_sums
from kernels.reference.linear import linear as reference_linear
from kernels.reference.linear import per_head_linear as reference_per_head_linear
from kernels.reference.prefill_attention import prefill_attention as reference_prefill_attention
from kernels.reference.rms_norm import rms_norm as reference_rms_norm
from kernels.reference.rotate_and_store import rotate_and_store as reference_rotate_and_store
from kernels.reference.rotate_and_store_latent import (
    rotate_and_store_latent as reference_rotate_and_store_latent,
)
from kernels.routing import NEVER as NEVER
from kernels.routing import ExpertChoice as ExpertChoice
from kernels.routing import ExpertRows as ExpertRows
from kernels.routing import ExpertWeights as ExpertWeights
from kernels.split_weight import SplitWeight, split_weight
from kernels.sum_lanes import SumLanes
from kernels.torch_ops.apply_token_mask import apply_token_mask as torch_apply_token_mask
from kernels.torch_ops.copy_blocks import copy_blocks as torch_copy_blocks
from kernels.torch_ops.encoder import Gelu as Gelu
from kernels.torch_ops.encoder import encoder_attention as encoder_attention
from kernels.torch_ops.encoder import encoder_linear as encoder_linear
from kernels.torch_ops.encoder import layer_norm as layer_norm
from kernels.torch_ops.encoder import pack_encoder_weight as pack_encoder_weight
from kernels.torch_ops.encoder import rotate_pairs as rotate_pairs
from kernels.torch_ops.expert_rows import add_experts as torch_add_experts
from kernels.torch_ops.expert_rows import sort_by_expert as torch_sort_by_expert
from kernels.torch_ops.gather_blocks import gather_blocks as torch_gather_blocks
from kernels.torch_ops.penalize import penalize as torch_penalize
from kernels.torch_ops.route import route as torch_route
from kernels.torch_ops.sample import argmax as torch_argmax
from kernels.torch_ops.sample import sample as torch_sample
from kernels.torch_ops.sample import scale
from kernels.torch_ops.sample_among import sample_among as sample_among
from kernels.torch_ops.scatter_blocks import scatter_blocks as torch_scatter_blocks
from kernels.torch_ops.select_rows import select_rows as torch_select_rows
from kernels.torch_ops.top_k import top_k as torch_top_k
from kernels.transcode import CodePart as CodePart
from kernels.transcode import Fp8Part as Fp8Part
from kernels.transcode import fp8_weight as fp8_weight
from kernels.transcode import grouped_weight as grouped_weight
from kernels.transcode import packed_part as packed_part
from kernels.transcode import unpacked as unpacked

if TYPE_CHECKING:
    from kernels.cpu.compile_plan import CompilePlan as CpuCompilePlan
    from kernels.cpu.compile_plan import QuantizedKind as CpuQuantizedKind
    from kernels.cpu.gemm.compressed_weight import CompressedWeight
    from kernels.cpu.gemm.lane_linear import LibraryLanes
    from kernels.cpu.host import CpuHost
    from kernels.cpu.layer.fused_layer import PackedLayer

P = ParamSpec("P")
R = TypeVar("R")
Op = Callable[Concatenate[Tensor, P], R]
Compressed: TypeAlias = "CompressedWeight | SplitWeight"
CpuCompressed: TypeAlias = "CompressedWeight"
Weight: TypeAlias = "Tensor | LibraryLanes | CompressedWeight | SplitWeight | QuantizedWeight"
LaneWeight: TypeAlias = "Tensor | LibraryLanes"
HeadWeights: TypeAlias = "Tensor | list[Tensor]"
LayerKernel: TypeAlias = "PackedLayer"
CompilePlan: TypeAlias = "CpuCompilePlan"
QuantizedKind: TypeAlias = "CpuQuantizedKind"
# The module of each operation's kernels, below `kernels/gpu/` and `kernels/cpu/`.
TRITON_MODULES = {
    "add_experts": "moe.expert_rows",
    "add_rms_norm": "rows.add_rms_norm",
    "apply_token_mask": "sampling.apply_token_mask",
    "clamped_gate": "rows.clamped_gate",
    "copy_blocks": "kv.copy_blocks",
    "decode_attention": "attention.decode_attention",
    "expert_mlp": "moe.expert_mlp",
    "gather_blocks": "kv.gather_blocks",
    "gelu_and_mul": "rows.gelu_and_mul",
    "grouped_linear": "gemm.grouped_linear",
    "grouped_sums": "gemm.grouped_linear",
    "top_k": "sampling.top_k",
    "lane_linear": "gemm.lane_linear",
    "lane_sums": "gemm.lane_linear",
    "linear": "gemm.linear",
    "penalize": "sampling.penalize",
    "per_head_linear": "gemm.per_head_linear",
    "prefill_attention": "attention.prefill_attention",
    "rms_norm": "rows.rms_norm",
    "rotate_and_store": "kv.rotate_and_store",
    "rotate_and_store_latent": "kv.rotate_and_store_latent",
    "route": "moe.route",
    "sample": "sampling.sample",
    "scatter_blocks": "kv.scatter_blocks",
    "silu_and_mul": "rows.silu_and_mul",
    "sort_by_expert": "moe.expert_rows",
}
CPU_MODULES = {
    "add_experts": "moe.expert_rows",
    "add_rms_norm": "layer.add_rms_norm",
    "clamped_gate": "layer.gated",
    "decode_attention": "attention.decode_attention",
    "gelu_and_mul": "layer.gated",
    "grouped_linear": "gemm.grouped_linear",
    "grouped_sums": "gemm.grouped_linear",
    "lane_linear": "gemm.lane_linear",
    "lane_sums": "gemm.lane_linear",
    "linear": "gemm.linear",
    "prefill_attention": "attention.prefill_attention",
    "rms_norm": "layer.rms_norm",
    "rotate_and_store": "attention.rotate_and_store",
    "rotate_and_store_latent": "attention.rotate_and_store_latent",
    "route": "moe.route",
    "silu_and_mul": "layer.gated",
    "sort_by_expert": "moe.expert_rows",
}
# These need no compiled loops: the library multiplies by unpacked weights and oneDNN's.
CPU_WITHOUT_LOOPS = frozenset(
    {"grouped_linear", "grouped_sums", "lane_linear", "lane_sums", "linear"}
)
# Whether torch.mm takes an `out_dtype`, which only CUDA computes.
HAS_WIDE_MM = "dtype" in torch.ops.aten.mm.overloads()
LANED_ROWS = 64  # limit of rows; with more, a split weight that sums in lanes is decompressed first
HAS_TRITON = has_triton_device()
if HAS_TRITON:
    from kernels.gpu.gemm.compressed_linear import compressed_linear as _fused_linear
    from kernels.gpu.gemm.compressed_linear import fits_lanes as _fits_lanes
    from kernels.gpu.gemm.decompress import decompress as _triton_decompress
    from kernels.gpu.gemm.fused_rows import fused_rows


@cache
def cpu_host() -> CpuHost:
    """Returns the host's CPU. Imports numba, which a worker on another device does not need."""
    from kernels.cpu.host import CpuHost

    return CpuHost()


@cache
def _cpu(module: str) -> Any:
    return import_module(f"kernels.cpu.{module}")


class Operation(Generic[P, R]):
    """Runs on its first tensor's device. A backend's function is resolved at its first call."""

    def __init__(self, library: Op[P, R]) -> None:
        self.name = library.__name__
        self.library = library

    def __call__(self, first: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self.on_cpu if first.is_cpu else self.elsewhere)(first, *args, **kwargs)

    @cached_property
    def on_cpu(self) -> Op[P, R]:
        if IS_INTERPRETED:
            return self.elsewhere
        if self.name not in CPU_MODULES:
            return self.library
        if self.name not in CPU_WITHOUT_LOOPS and not cpu_host().has_kernels:
            return self.library
        found: Op[P, R] = getattr(_cpu(CPU_MODULES[self.name]), self.name)
        return found

    @cached_property
    def elsewhere(self) -> Op[P, R]:
        if not HAS_TRITON or self.name not in TRITON_MODULES:
            return self.library
        module = import_module(f"kernels.gpu.{TRITON_MODULES[self.name]}")
        found: Op[P, R] = getattr(module, self.name)
        return found


add_experts = Operation(torch_add_experts)
add_rms_norm = Operation(reference_add_rms_norm)
apply_token_mask = Operation(torch_apply_token_mask)
clamped_gate = Operation(reference_clamped_gate)
copy_blocks = Operation(torch_copy_blocks)
decode_attention = Operation(reference_decode_attention)
expert_mlp = Operation(reference_expert_mlp)
gather_blocks = Operation(torch_gather_blocks)
gelu_and_mul = Operation(reference_gelu_and_mul)
top_k = Operation(torch_top_k)
penalize = Operation(torch_penalize)
prefill_attention = Operation(reference_prefill_attention)
rms_norm = Operation(reference_rms_norm)
rotate_and_store = Operation(reference_rotate_and_store)
rotate_and_store_latent = Operation(reference_rotate_and_store_latent)
route = Operation(torch_route)
sample = Operation(torch_sample)
scatter_blocks = Operation(torch_scatter_blocks)
silu_and_mul = Operation(reference_silu_and_mul)
sort_by_expert = Operation(torch_sort_by_expert)
_linear = Operation(reference_linear)
_lane_linear = Operation(reference_lane_linear)
_lane_sums = Operation(reference_lane_sums)
_per_head_linear = Operation(reference_per_head_linear)
_grouped_linear = Operation(reference_grouped_linear)
_grouped_sums = Operation(reference_grouped_sums)
scale_logits = scale
argmax = torch_argmax
select_split_rows = torch_select_rows


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    is_batch_invariant: bool = False,
) -> Tensor:
    """Returns the GEMM with a dense weight, packed or not. On CUDA the library multiplies, unless a
    row's bits must not depend on the others.
    """
    if _is_for_library(x, is_batch_invariant=is_batch_invariant):
        return torch.nn.functional.linear(x, weight, bias)
    return _linear(x, weight, bias, is_batch_invariant=is_batch_invariant)


def is_for_library(x: Tensor, *, is_batch_invariant: bool) -> bool:
    """Whether the library may multiply rows like x, or a kernel whose bits depend on the others."""
    return _is_for_library(x, is_batch_invariant=is_batch_invariant)


def _is_for_library(x: Tensor, *, is_batch_invariant: bool) -> bool:
    return (x.is_cuda or x.is_meta) and not is_batch_invariant


def wide_linear(x: Tensor, weight: Tensor, *, is_batch_invariant: bool = False) -> Tensor:
    """Computes `linear` as FP32. On CUDA the library's sums are not rounded before, unless a row's
    bits must not depend on the others.
    """
    if has_wide_library(x, is_batch_invariant=is_batch_invariant):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear(x, weight, is_batch_invariant=is_batch_invariant).float()


def has_wide_library(x: Tensor, *, is_batch_invariant: bool) -> bool:
    """Whether the library multiplies rows like x and returns its FP32 sums."""
    is_library = _is_for_library(x, is_batch_invariant=is_batch_invariant)
    return is_library and HAS_WIDE_MM and x.dtype in (torch.bfloat16, torch.float16)


def narrowed(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns an FP32 weight in `dtype`; None if that loses something, or `wide_linear` does not
    multiply with it on its device.
    """
    if not has_wide_library(weight.new_empty(0, dtype=dtype), is_batch_invariant=False):
        return None
    narrow = weight.to(dtype)
    if not weight.is_meta and not torch.equal(narrow.float(), weight):
        return None
    return narrow


def per_head_linear(
    x: Tensor,
    weights: HeadWeights,
    *,
    is_batch_invariant: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, num_heads, K] and `pack_heads` of weights [num_heads, N, K] -> [T, num_heads, N], in
    `out` if it is given.

    A row's bits depend on the others only on CUDA, where the library multiplies unless they must
    not. Compiled loops multiply one head after the other.
    """
    if not isinstance(weights, Tensor):
        products = [
            linear(x[:, head], weight, is_batch_invariant=is_batch_invariant)
            for head, weight in enumerate(weights)
        ]
        product = torch.stack(products, dim=1)
        return product if out is None else out.copy_(product)
    if not _is_for_library(x, is_batch_invariant=is_batch_invariant):
        return _per_head_linear(x, weights, out=out)
    if out is None:
        out = x.new_empty(len(x), *weights.shape[:2])
    torch.bmm(x.transpose(0, 1), weights.transpose(1, 2), out=out.transpose(0, 1))
    return out


def lane_linear(
    x: Tensor,
    weight: LaneWeight | CpuCompressed,
    bias: Tensor | None = None,
    *,
    lanes: SumLanes,
    is_batch_invariant: bool = True,
) -> Tensor:
    """Computes `linear` with sums over K in lanes, with any weight of the CPU. On CUDA the library
    multiplies, without lanes, unless a row's bits must not depend on the others.
    """
    if _is_for_library(x, is_batch_invariant=is_batch_invariant):
        return torch.nn.functional.linear(x, weight, bias)  # type: ignore[arg-type]
    multiply: Any = _lane_linear
    y: Tensor = multiply(x, weight, bias, lanes=lanes)
    return y


def lane_sums(
    x: Tensor, weight: LaneWeight | CpuCompressed, *, lanes: SumLanes, num_sums: int = 1
) -> Tensor:
    """Returns the FP32 sums of `num_sums` subtrees of the lanes: [num_sums, T, N]."""
    add: Any = _lane_sums
    sums: Tensor = add(x, weight, lanes=lanes, num_sums=num_sums)
    return sums


def grouped_linear(
    x: Tensor,
    rows: Tensor | None,
    offsets: Tensor,
    weight: Tensor | CpuCompressed | QuantizedWeight,
    *,
    lanes: SumLanes,
) -> Tensor:
    """Computes `lane_linear` of the rows of each expert with its part of a weight [E · N, K], see
    kernels.reference.grouped_linear.
    """
    multiply: Any = _grouped_linear
    y: Tensor = multiply(x, rows, offsets, weight, lanes=lanes)
    return y


def grouped_sums(
    x: Tensor,
    rows: Tensor | None,
    offsets: Tensor,
    weight: Tensor | CpuCompressed | QuantizedWeight,
    *,
    lanes: SumLanes,
    num_sums: int = 1,
) -> Tensor:
    """Returns the FP32 sums of `num_sums` subtrees of the lanes: [num_sums, S, N]."""
    add: Any = _grouped_sums
    sums: Tensor = add(x, rows, offsets, weight, lanes=lanes, num_sums=num_sums)
    return sums


def reason_against_grouped(weights: ExpertWeights, num_experts: int) -> str:
    """Returns why torch's grouped GEMM cannot compute `expert_mlp`; empty if it can. Launches
    nothing.
    """
    from kernels.gpu.moe.library_experts import library_case, reason_against

    return reason_against(library_case(weights, num_experts))


def cpu_compressed_linear(x: Tensor, weight: CpuCompressed, bias: Tensor | None = None) -> Tensor:
    """Computes `linear` with a compressed weight of the CPU."""
    y: Tensor = _cpu("gemm.compressed_linear").compressed_linear(x, weight, bias)
    return y


def gemm_row_counts(
    weights: Iterable[tuple[Weight, SumLanes | None]],
    dtype: torch.dtype,
    max_rows: int,
    *,
    is_batch_invariant: bool,
) -> list[int]:
    """Numbers of rows that between them launch every kernel of `linear`, or `lane_linear`, with
    these weights; empty where the kernels do not depend on the number of rows.
    """
    shapes = [(each.shape, lanes) for each, lanes in weights if _is_multiplied_by_triton(each)]
    if not shapes:
        return []
    from kernels.gpu.gemm.linear_tile import row_counts

    return row_counts(
        [(rows, width, lanes) for (rows, width), lanes in shapes],
        dtype,
        max_rows,
        is_batch_invariant=is_batch_invariant,
    )


def _is_multiplied_by_triton(
    weight: Weight,
) -> TypeGuard[Tensor | SplitWeight | QuantizedWeight]:
    if not isinstance(weight, SplitWeight | QuantizedWeight | Tensor) or len(weight.shape) != 2:
        return False
    return _is_for_triton(weight.device)


def packed_form(weight: LaneWeight | CpuCompressed | QuantizedWeight) -> Any:
    """Returns the form of a weight that the compiled loops multiply with; None if it is not
    packed.
    """
    if isinstance(weight, Tensor) and not _is_for_loops(weight):
        return None
    if isinstance(weight, QuantizedWeight) and not _has_loops(weight):
        return None
    return _cpu("gemm.packed_linear").for_gemm(weight)


def packed_logits(x: Tensor, packed: Any) -> Tensor:
    """Computes `linear` with a `packed_form`, as FP32."""
    y: Tensor = _cpu("gemm.packed_linear").packed_linear(x, packed, dtype=torch.float32)
    return y


def packed_argmax(x: Tensor, packed: Any) -> Tensor:
    """argmax(`packed_logits`), [T] int64; the first index among equal maxima."""
    columns: Tensor = _cpu("gemm.argmax").packed_argmax(x, packed)
    return columns


def select_compressed_rows(weight: CpuCompressed, row_ids: Tensor) -> Tensor:
    """weight [N, K], row_ids [T] -> [T, K]."""
    rows: Tensor = _cpu("gemm.decompress_rows").select_rows(weight, row_ids)
    return rows


def decompress(weight: SplitWeight, out: Tensor | None = None) -> Tensor:
    """Returns the dense weight of a split one. (A CPU's compressed weight is never fully
    decoded.)
    """
    is_here = _is_for_triton(weight.device)
    return (_triton_decompress if is_here else reference_decompress)(weight, out)


def compressed_linear(
    x: Tensor, weight: SplitWeight, bias: Tensor | None = None, *, is_batch_invariant: bool = False
) -> Tensor:
    """Computes `linear` with a split weight. For few rows the kernel decodes it; for many it is
    decompressed into temporary memory, and `linear` multiplies. In the batch-invariant mode both
    ways give the bits of `linear`.
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


def compressed_lane_linear(
    x: Tensor, weight: SplitWeight, bias: Tensor | None = None, *, lanes: SumLanes
) -> Tensor:
    """Computes `lane_linear` with a split weight, bit-identical to that with the dense one."""
    if _is_for_triton(x.device) and len(x) <= LANED_ROWS and _fits_lanes(lanes):
        return _fused_linear(x, weight, bias, lanes=lanes)
    return lane_linear(x, decompress(weight), bias, lanes=lanes)


def quantized_linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    is_batch_invariant: bool = False,
) -> Tensor:
    """Computes `linear` with a quantized weight, with the bits of the dequantized one. On CPUs a
    part of it is decoded at a time; elsewhere it is dequantized into temporary memory.
    """
    if _is_for_loops(weight.memory):
        module = _cpu("gemm.quantized_linear")
        y: Tensor = module.quantized_linear(x, weight, bias, has_kernels=cpu_host().has_kernels)
        return y
    return linear(x, weight.dense(), bias, is_batch_invariant=is_batch_invariant)


def quantized_lane_linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    lanes: SumLanes,
    is_batch_invariant: bool = True,
) -> Tensor:
    """Computes `lane_linear` with a quantized weight."""
    if _is_for_loops(weight.memory):
        mode = {"lanes": lanes, "has_kernels": cpu_host().has_kernels}
        y: Tensor = _cpu("gemm.quantized_linear").quantized_lane_linear(x, weight, bias, **mode)
        return y
    dense = weight.dense()
    return lane_linear(x, dense, bias, lanes=lanes, is_batch_invariant=is_batch_invariant)


def quantized_lane_sums(
    x: Tensor, weight: QuantizedWeight, *, lanes: SumLanes, num_sums: int = 1
) -> Tensor:
    """Computes `lane_sums` with a quantized weight."""
    if _is_for_loops(weight.memory):
        mode = {"lanes": lanes, "num_sums": num_sums, "has_kernels": cpu_host().has_kernels}
        sums: Tensor = _cpu("gemm.quantized_linear").quantized_lane_sums(x, weight, **mode)
        return sums
    return lane_sums(x, weight.dense(), lanes=lanes, num_sums=num_sums)


def _has_loops(weight: QuantizedWeight) -> bool:
    return _is_for_loops(weight.memory) and cpu_host().has_kernels


def _is_for_triton(device: torch.device) -> bool:
    return HAS_TRITON and (IS_INTERPRETED or device.type != "cpu")


def _is_for_loops(tensor: Tensor) -> bool:
    """Whether the compiled loops, or the library on a host without them, compute with `tensor`."""
    return tensor.is_cpu and not IS_INTERPRETED


def pack_weight(weight: Tensor) -> Tensor:
    """weight [N, K] in the form that `linear` multiplies with."""
    return cpu_host().pack_weight(weight) if _is_for_loops(weight) else weight


def pack_heads(weight: Tensor) -> HeadWeights:
    """weight [num_heads, N, K] in the form that `per_head_linear` multiplies with."""
    if _is_for_loops(weight):
        return [pack_weight(each.contiguous()) for each in weight]
    return weight.contiguous()


def pack_lanes(weight: Tensor, lanes: SumLanes) -> LaneWeight:
    """weight [N, K] in the form that `lane_linear` multiplies with; unchanged if it is packed."""
    if not _is_for_loops(weight) or packed_form(weight) is not None:
        return weight
    return cpu_host().pack_lanes(weight, lanes)


def pack_experts(weight: Tensor) -> Tensor:
    """weight [E · N, K] in the form that `grouped_linear` multiplies with."""
    return cpu_host().pack_experts(weight) if _is_for_loops(weight) else weight


def can_compress_experts(weight: Tensor) -> bool:
    """Whether `grouped_linear` multiplies with a compressed weight like this one."""
    if not _is_for_loops(weight):
        return False
    dtype = str(weight.dtype).removeprefix("torch.")
    return cpu_host().has_kernels and cpu_host().has_gemm(dtype)


def lane_parts(weight: object) -> tuple[Tensor | None, ...]:
    """Returns the tensors of a result of `pack_lanes`; none for any other weight."""
    parts: tuple[Tensor | None, ...] = getattr(weight, "parts", ())
    return parts


def compress_weight(weight: Tensor) -> Compressed | None:
    """weight [N, K] in a smaller, lossless form for `linear` and `select_rows`.

    None if that would save nothing, or the device has no GEMM for it.
    """
    if _is_for_triton(weight.device):
        return split_weight(weight)
    return cpu_host().compress_weight(weight) if weight.is_cpu else None


def is_compressed(weight: object) -> TypeGuard[Compressed]:
    """Whether `weight` is a result of `compress_weight`."""
    return isinstance(weight, SplitWeight) or is_cpu_compressed(weight)


def is_cpu_compressed(weight: object) -> TypeGuard[CpuCompressed]:
    if weight is None or isinstance(weight, Tensor | SplitWeight | QuantizedWeight):
        return False
    return isinstance(weight, _cpu("gemm.compressed_weight").CompressedWeight)


def layer_kernel(
    norms: tuple[Tensor, Tensor],
    weights: Sequence[Weight],
    lanes: tuple[SumLanes, SumLanes],
    **options: Any,
) -> LayerKernel | None:
    """Returns a decoder layer without its attention, see
    kernels.cpu.layer.fused_layer.packed_layer.

    None if no backend has one for such weights.
    """
    if not _is_for_loops(norms[0]):
        return None
    kernel: LayerKernel | None = _cpu("layer.fused_layer").packed_layer(
        norms, weights, lanes, **options
    )
    return kernel
