"""Checks which function of which backend each operation uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Operation: its module in the library, in `kernels.cpu`, in `kernels.gpu`; None: the library.
BACKENDS = {
    "_grouped_linear": (
        "reference.grouped_linear",
        "cpu.gemm.grouped_linear",
        "gpu.gemm.grouped_linear",
    ),
    "_grouped_sums": (
        "reference.grouped_linear",
        "cpu.gemm.grouped_linear",
        "gpu.gemm.grouped_linear",
    ),
    "_lane_linear": ("reference.lane_linear", "cpu.gemm.lane_linear", "gpu.gemm.lane_linear"),
    "_lane_sums": ("reference.lane_linear", "cpu.gemm.lane_linear", "gpu.gemm.lane_linear"),
    "_linear": ("reference.linear", "cpu.gemm.linear", "gpu.gemm.linear"),
    "_per_head_linear": ("reference.linear", None, "gpu.gemm.per_head_linear"),
    "add_experts": ("torch_ops.expert_rows", "cpu.moe.expert_rows", "gpu.moe.expert_rows"),
    "add_rms_norm": (
        "reference.add_rms_norm",
        "cpu.layer.add_rms_norm",
        "gpu.rows.add_rms_norm",
    ),
    "copy_blocks": ("torch_ops.copy_blocks", None, "gpu.kv.copy_blocks"),
    "decode_attention": (
        "reference.decode_attention",
        "cpu.attention.decode_attention",
        "gpu.attention.decode_attention",
    ),
    "clamped_gate": ("reference.gated", "cpu.layer.gated", "gpu.rows.clamped_gate"),
    "apply_token_mask": (
        "torch_ops.apply_token_mask",
        None,
        "gpu.sampling.apply_token_mask",
    ),
    "expert_mlp": ("reference.grouped_linear", None, "gpu.moe.expert_mlp"),
    "gather_blocks": ("torch_ops.gather_blocks", None, "gpu.kv.gather_blocks"),
    "gelu_and_mul": ("reference.gated", "cpu.layer.gated", "gpu.rows.gelu_and_mul"),
    "top_k": ("torch_ops.top_k", None, "gpu.sampling.top_k"),
    "penalize": ("torch_ops.penalize", None, "gpu.sampling.penalize"),
    "prefill_attention": (
        "reference.prefill_attention",
        "cpu.attention.prefill_attention",
        "gpu.attention.prefill_attention",
    ),
    "rms_norm": ("reference.rms_norm", "cpu.layer.rms_norm", "gpu.rows.rms_norm"),
    "rotate_and_store": (
        "reference.rotate_and_store",
        "cpu.attention.rotate_and_store",
        "gpu.kv.rotate_and_store",
    ),
    "rotate_and_store_latent": (
        "reference.rotate_and_store_latent",
        "cpu.attention.rotate_and_store_latent",
        "gpu.kv.rotate_and_store_latent",
    ),
    "route": ("torch_ops.route", "cpu.moe.route", "gpu.moe.route"),
    "sample": ("torch_ops.sample", None, "gpu.sampling.sample"),
    "scatter_blocks": ("torch_ops.scatter_blocks", None, "gpu.kv.scatter_blocks"),
    "silu_and_mul": ("reference.gated", "cpu.layer.gated", "gpu.rows.silu_and_mul"),
    "sort_by_expert": ("torch_ops.expert_rows", "cpu.moe.expert_rows", "gpu.moe.expert_rows"),
}
SOURCE = """
import json
from kernels import ops
operations = {name: each for name, each in vars(ops).items() if isinstance(each, ops.Operation)}
print(json.dumps({
    name: [getattr(each, side).__module__ for side in ("library", "on_cpu", "elsewhere")]
    for name, each in operations.items()
}))
"""


def _modules(**environ: str) -> dict[str, list[str]]:
    inherited = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-c", SOURCE],
        cwd=ROOT,
        env=inherited | {"CUDA_VISIBLE_DEVICES": ""} | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list[str]] = json.loads(child.stdout)
    return {
        name: [module.removeprefix("kernels.") for module in modules]
        for name, modules in found.items()
    }


@pytest.mark.long
def test_cpu_uses_its_loops_or_else_the_library() -> None:
    assert _modules() == {
        name: [library, cpu or library, library] for name, (library, cpu, _) in BACKENDS.items()
    }


def test_triton_has_every_operation() -> None:
    assert _modules(TRITON_INTERPRET="1") == {
        name: [library, gpu or library, gpu or library]
        for name, (library, _, gpu) in BACKENDS.items()
    }
