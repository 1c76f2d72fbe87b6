"""Runs a part of a model's kernels once, which compiles them; the child processes of warm.py.

Machine code depends on dtypes and layouts, not on sizes, so small tensors replace the model's.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kernels.cpu.compile import locked
from kernels.cpu.compile_plan import CompilePlan, QuantizedKind
from kernels.cpu.deferred_codegen import defer_codegen
from kernels.quantized_weight import (
    Code,
    Fp8Layout,
    GroupedLayout,
    QuantizedLayout,
    QuantizedWeight,
    memory_bytes,
)
from kernels.sum_lanes import SumLanes

_FEW, _MANY = 1, 65  # rows: for one thread, and for all
_BLOCK = 32  # rows, columns, and elements of K


def main(part: str, mode: str, plan: CompilePlan) -> None:
    gc.disable()  # collections take a tenth of the time of a process this short
    if mode == "deferred":
        defer_codegen()
    match part:
        case "attention":
            compile_attention(plan)
        case "layers":
            compile_layers(plan)
        case _:
            marker = plan.marker("rows")
            with locked(marker.with_suffix(".lock")):
                if not marker.exists():
                    compile_layers_by_rows(plan)
                    marker.touch()


def compile_attention(plan: CompilePlan) -> None:
    from kernels.cpu.attention.prefill_attention import prefill_attention
    from kernels.cpu.codec import frame_codec
    from kernels.cpu.layer.rms_norm import rms_norm

    query, cache = _zeros(plan, 2, 1, plan.head_dim), _cache(plan)
    cache = cache.to(torch.float8_e4m3fn) if plan.has_fp8_kv else cache
    table, lens, starts = torch.zeros(1, 1).long(), torch.tensor([2]), torch.tensor([0, 2])
    prefill_attention(query, cache, table, starts, lens, 1.0)
    rms_norm(_zeros(plan, _FEW, _BLOCK), _zeros(plan, _BLOCK), 0.0)
    if plan.dtype == "bfloat16":
        frame = torch.zeros(frame_codec.BLOCK_BYTES, dtype=torch.uint8).numpy()
        coded = frame.copy()
        num_bytes = frame_codec.encode_frame(frame, coded)
        frame_codec.decode_frame(coded[:num_bytes], frame)


def compile_layers(plan: CompilePlan) -> None:
    from kernels.cpu.gemm.argmax import packed_argmax
    from kernels.cpu.gemm.compressed_weight import CompressedWeight
    from kernels.cpu.gemm.decompress_rows import select_rows
    from kernels.cpu.gemm.packed_linear import for_gemm, packed_linear

    if plan.has_experts:
        _compile_single_operations(plan)
        _compile_experts(plan)
    if plan.is_blocked:
        _Layer(plan).run(_FEW)
        head, x = _weight(plan, _BLOCK, _BLOCK), _zeros(plan, _FEW, _BLOCK)
        packed = for_gemm(head)
        packed_linear(x, packed, dtype=torch.float32)
        packed_argmax(x, packed)
        if isinstance(head, CompressedWeight):
            select_rows(head, torch.zeros(1).long())
    elif not plan.has_experts:
        _compile_single_operations(plan)
    if plan.has_experts or plan.has_latents or plan.has_fp8_kv:
        _compile_gemms(plan)


def _compile_single_operations(plan: CompilePlan) -> None:
    from kernels.cpu.attention.rotate_and_store import rotate_and_store
    from kernels.cpu.layer.gated import clamped_gate, gelu_and_mul, silu_and_mul
    from kernels.cpu.layer.rms_norm import rms_norm

    cos, sin = torch.zeros(2, _MANY, plan.head_dim // 2)
    for num_rows in (_FEW, _MANY):
        mode = {"is_rounded_once": plan.has_clamped_gates}
        rms_norm(_zeros(plan, num_rows, _BLOCK), _zeros(plan, _BLOCK), 0.0, **mode)
        if not (plan.has_latents or plan.has_fp8_kv):
            heads, slots = _zeros(plan, num_rows, 3, plan.head_dim), torch.full((num_rows,), -1)
            rotate_and_store(heads, cos[:num_rows], sin[:num_rows], _cache(plan), slots)
    gate_up = _zeros(plan, _FEW, 2 * _BLOCK)
    if plan.has_clamped_gates:
        clamped_gate(gate_up, gate_up, torch.zeros(_FEW).long(), limit=1.0, alpha=1.0)
    else:
        (gelu_and_mul if plan.has_gelu else silu_and_mul)(gate_up)


def _compile_gemms(plan: CompilePlan) -> None:
    """Compiles the GEMMs of layers that are not fused, and of the output head."""
    from kernels.cpu.gemm.argmax import packed_argmax
    from kernels.cpu.gemm.lane_linear import lane_linear
    from kernels.cpu.gemm.packed_linear import for_gemm, packed_linear

    x, lanes = _zeros(plan, _FEW, _BLOCK), SumLanes.of((0, _BLOCK))
    packed = for_gemm(_weight(plan, _BLOCK, _BLOCK))
    if packed is not None:
        packed_linear(x, packed, dtype=torch.float32)
        packed_argmax(x, packed)
    qkv, output, gate_up, down = plan.quantized or ("dense",) * 4
    for each in _packable(plan, output, down):
        lane_linear(x, each, lanes=lanes)
    for each in _packable(plan, qkv, gate_up, "dense"):
        packed_linear(x, for_gemm(each))


def _compile_experts(plan: CompilePlan) -> None:
    """The operations of a layer with experts, beside the single ones of any layer."""
    from kernels.cpu.gemm.grouped_linear import grouped_linear
    from kernels.cpu.moe.expert_rows import add_experts, sort_by_expert
    from kernels.cpu.moe.route import route

    logits, x, lanes = torch.zeros(_FEW, 1), _zeros(plan, _FEW, _BLOCK), SumLanes.of((0, _BLOCK))
    choice = route(logits, None, 1, _Routing())
    rows = sort_by_expert(choice.ids, 1)
    for each in _packable(plan, *(plan.quantized_experts or ("dense",))):
        grouped_linear(x, rows.tokens, rows.offsets, each, lanes=lanes)
    add_experts(x, rows.places, choice.weights, None, _BLOCK)


def _packable(plan: CompilePlan, *kinds: QuantizedKind) -> list[Any]:
    """A weight of each kind that the compiled loops multiply with."""
    from kernels.cpu.gemm.packed_linear import for_gemm

    shape = _BLOCK, _BLOCK
    found = [
        _weight(plan, *shape) if kind == "dense" else _quantized_weight(kind, shape)
        for kind in sorted(set(kinds))
    ]
    return [each for each in found if for_gemm(each) is not None]


def compile_layers_by_rows(plan: CompilePlan) -> None:
    _Layer(plan).run(_FEW, is_by_rows=True)


class _Layer:
    """A decoder layer of the plan's dtype and layouts, with the smallest possible sizes."""

    def __init__(self, plan: CompilePlan) -> None:
        from kernels.cpu.layer.fused_layer import packed_layer

        self._plan = plan
        self._num_heads = _BLOCK // gcd(_BLOCK, plan.head_dim)
        width = self._num_heads * plan.head_dim
        shapes = (3 * width, _BLOCK), (_BLOCK, width), (2 * _BLOCK, _BLOCK), (_BLOCK, _BLOCK)
        kernel = packed_layer(
            (_zeros(plan, _BLOCK), _zeros(plan, _BLOCK)),
            _weights(plan, shapes),
            (SumLanes.of((0, width)), SumLanes.of((0, _BLOCK))),
            qkv_bias=None,
            head_norms=(),
            post_norms=(),
            eps=1.0,
            has_unit_offset=False,
            activation="gelu_pytorch_tanh" if plan.has_gelu else "silu",
        )
        if kernel is None:
            raise ValueError(f"no kernel for layers of {plan}")
        self._kernel = kernel

    def run(self, num_rows: int, *, is_by_rows: bool = False) -> None:
        plan, heads = self._plan, self._num_heads
        x = _zeros(plan, num_rows, _BLOCK)
        cache = torch.zeros(2, 1, heads, plan.block_size, plan.head_dim, dtype=x.dtype)
        cos, sin = torch.zeros(2, num_rows, plan.head_dim // 2)
        slots = torch.full((num_rows,), -1)
        self._kernel.pre_attention(x, cos, sin, cache, slots, is_by_rows=is_by_rows)
        self._kernel.post_attention(
            x, _zeros(plan, num_rows, heads, plan.head_dim), is_by_rows=is_by_rows
        )


class _Routing(NamedTuple):
    score: str = "softmax"
    is_renormalised: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


def _zeros(plan: CompilePlan, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=getattr(torch, plan.dtype))


def _cache(plan: CompilePlan) -> Tensor:
    return _zeros(plan, 2, 1, 1, plan.block_size, plan.head_dim)


def _weights(plan: CompilePlan, shapes: Sequence[tuple[int, int]]) -> list[Any]:
    kinds: Sequence[QuantizedKind] = plan.quantized or ["dense"] * len(shapes)
    return [
        _weight(plan, *shape) if kind == "dense" else _quantized_weight(kind, shape)
        for kind, shape in zip(kinds, shapes, strict=True)
    ]


def _quantized_weight(kind: QuantizedKind, shape: tuple[int, int]) -> QuantizedWeight:
    layout: QuantizedLayout
    if kind == "fp8":
        layout = Fp8Layout(shape, _BLOCK)
    else:
        code, *options = kind.split("-")
        scale_dtype = {"floats": "float32", "halves": "float16"}.get(options[-1] if options else "")
        scale_dtype = "uint8" if code == "e2m1" else scale_dtype
        layout = GroupedLayout(
            shape,
            _BLOCK,
            scale_dtype or "bfloat16",
            has_zeros="zeros" in options,
            code=cast(Code, code),
        )
    memory = torch.zeros(memory_bytes(layout), dtype=torch.uint8)
    return QuantizedWeight(layout, memory, torch.bfloat16)


def _weight(plan: CompilePlan, num_rows: int, width: int) -> Any:
    from kernels.cpu.gemm.compressed_weight import compress_weight
    from kernels.cpu.gemm.linear import pack_weight

    weight = _zeros(plan, num_rows, width)
    compressed = compress_weight(weight) if plan.is_compressed else None
    return pack_weight(weight) if compressed is None else compressed


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], CompilePlan(**json.loads(sys.argv[3])))
    sys.stdout.flush()
    os._exit(0)
