"""Compiles what a model will run, in child processes, before the model is loaded.

    attention   attention, norms, and the KV codec          } concurrently: each fills the
    layers      decoder layers by columns, output head      } cache, the caller loads the code
    rows        decoder layers by rows: after the worker is ready, at low priority

Machine code depends on dtypes and layouts, not on sizes, so small tensors replace the model's. If
a child fails, the host cannot compile (see probe.py), and the library serves instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from math import gcd
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.cpu import probe
from kernels.cpu.compile import cache_dir, compile_lock, locked, start_child

Part = Literal["attention", "layers", "rows"]
LOW_PRIORITY = 19
_FEW, _MANY = 1, 65  # rows: for one thread, and for all
_BLOCK = 32  # of rows, of columns, and of K


@dataclass(frozen=True)
class CompilePlan:
    """What determines the machine code for a model."""

    dtype: str  # torch's name
    head_dim: int
    block_size: int
    is_compressed: bool  # the weights
    is_blocked: bool  # all matrices consist of full blocks of 32: layers have a kernel
    has_plain_attention: bool  # some layer has neither window nor softcap
    has_masked_attention: bool
    has_gelu: bool

    def marker(self, part: str) -> Path:
        """A file that exists once the part is compiled."""
        described = json.dumps([part, probe.target_key(), asdict(self)])
        digest = blake2b(described.encode(), digest_size=8).hexdigest()
        return Path(cache_dir(), f"compiled-{part}-{digest}")


def compile_ahead(plan: CompilePlan) -> str | None:
    """Waits until the machine code is in the cache. Returns why it cannot be compiled, or None.

    One process of a host compiles, the others wait for it.
    """
    if probe.lacks_fma():
        return probe.failure()
    marker = plan.marker("start")
    try:
        if not marker.exists():
            with compile_lock():
                if not marker.exists():
                    _compile_in_children(plan, marker)
    except OSError as error:
        return f"no cache for machine code: {error}"
    return probe.failure()


def _compile_in_children(plan: CompilePlan, marker: Path) -> None:
    if probe.known_failure() is not None:
        return
    parts: tuple[Part, ...] = ("layers", "attention")
    children = [_start(plan, part) for part in parts]
    endings = [(child.communicate()[1], child.returncode) for child in children]
    for errors, status in endings:
        if status != 0:
            probe.record(status, errors)
            return
    probe.record(0, "")
    marker.touch()


def _start(plan: CompilePlan, part: Part, niceness: int = 0) -> subprocess.Popen[str]:
    return start_child("kernels.cpu.warm", part, json.dumps(asdict(plan)), niceness=niceness)


def compile_rows(plan: CompilePlan, is_wanted: Callable[[], bool]) -> None:
    """Compiles layers by rows at low priority and loads the code: until then long prompts are
    computed by columns, with the same bits. Stops early if `is_wanted` returns False.
    """
    if not plan.is_blocked or probe.failure() is not None:
        return
    marker = plan.marker("rows")
    if not marker.exists():
        child = _start(plan, "rows", LOW_PRIORITY)
        while child.poll() is None:
            if not is_wanted():
                child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=0.2)
    if marker.exists() and is_wanted():
        _compile_layers_by_rows(plan)


def main(part: str, plan: CompilePlan) -> None:
    match part:
        case "attention":
            _compile_attention(plan)
        case "layers":
            _compile_layers(plan)
        case _:
            marker = plan.marker("rows")
            with locked(marker.with_suffix(".lock")):
                if not marker.exists():
                    _compile_layers_by_rows(plan)
                    marker.touch()


def _compile_attention(plan: CompilePlan) -> None:
    from kernels.cpu.attention.prefill_attention import prefill_attention
    from kernels.cpu.codec import frame_codec
    from kernels.cpu.layer.rms_norm import rms_norm

    query, cache = _zeros(plan, 2, 1, plan.head_dim), _cache(plan)
    table, lens, starts = torch.zeros(1, 1).long(), torch.tensor([2]), torch.tensor([0, 2])
    if plan.has_plain_attention:
        prefill_attention(query, cache, table, starts, lens, 1.0)
    if plan.has_masked_attention:
        prefill_attention(query, cache, table, starts, lens, 1.0, lower=torch.zeros(2).int())
    rms_norm(_zeros(plan, _FEW, _BLOCK), _zeros(plan, _BLOCK), 0.0)
    if plan.dtype == "bfloat16":
        frame = torch.zeros(frame_codec.BLOCK_BYTES, dtype=torch.uint8).numpy()
        coded = frame.copy()
        num_bytes = frame_codec.encode_frame(frame, coded)
        frame_codec.decode_frame(coded[:num_bytes], frame)


def _compile_layers(plan: CompilePlan) -> None:
    from kernels.cpu.gemm.argmax import packed_argmax
    from kernels.cpu.gemm.compressed_weight import CompressedWeight
    from kernels.cpu.gemm.decompress_rows import select_rows
    from kernels.cpu.gemm.packed_linear import for_products, packed_linear

    if plan.is_blocked:
        _Layer(plan).run(_FEW)
        head, x = _weight(plan, _BLOCK, _BLOCK), _zeros(plan, _FEW, _BLOCK)
        packed = for_products(head)
        packed_linear(x, packed, dtype=torch.float32)
        packed_argmax(x, packed)
        if isinstance(head, CompressedWeight):
            select_rows(head, torch.zeros(1).long())
        return
    _compile_single_operations(plan)


def _compile_single_operations(plan: CompilePlan) -> None:
    from kernels.cpu.attention.rotate_and_store import rotate_and_store
    from kernels.cpu.layer.gated import gelu_and_mul, silu_and_mul
    from kernels.cpu.layer.rms_norm import rms_norm

    cos, sin = torch.zeros(2, _MANY, plan.head_dim // 2)
    for num_rows in (_FEW, _MANY):
        rms_norm(_zeros(plan, num_rows, _BLOCK), _zeros(plan, _BLOCK), 0.0)
        heads, slots = _zeros(plan, num_rows, 3, plan.head_dim), torch.full((num_rows,), -1)
        rotate_and_store(heads, cos[:num_rows], sin[:num_rows], _cache(plan), slots)
    (gelu_and_mul if plan.has_gelu else silu_and_mul)(_zeros(plan, _FEW, 2 * _BLOCK))


def _compile_layers_by_rows(plan: CompilePlan) -> None:
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
            [_weight(plan, *shape) for shape in shapes],
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


def _zeros(plan: CompilePlan, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=getattr(torch, plan.dtype))


def _cache(plan: CompilePlan) -> Tensor:
    return _zeros(plan, 2, 1, 1, plan.block_size, plan.head_dim)


def _weight(plan: CompilePlan, num_rows: int, width: int) -> Any:
    from kernels.cpu.gemm.compressed_weight import compress_weight
    from kernels.cpu.gemm.linear import pack_weight

    weight = _zeros(plan, num_rows, width)
    compressed = compress_weight(weight) if plan.is_compressed else None
    return pack_weight(weight) if compressed is None else compressed


if __name__ == "__main__":
    main(sys.argv[1], CompilePlan(**json.loads(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)
