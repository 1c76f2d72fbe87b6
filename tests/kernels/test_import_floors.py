"""Import rules of `kernels`: a module imports only from layers below its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# From the top down. Members of one layer do not import each other.
LAYERS = [
    {"kernels.ops", "kernels.host_codec"},
    {"kernels.cpu", "kernels.gpu"},
    {"kernels.reference"},
    {"kernels.torch_ops"},
    {"kernels.transcode"},
    {
        "kernels.split_weight",
        "kernels.quantized_weight",
        "kernels.sum_lanes",
        "kernels.device",
        "kernels.cache",
        "kernels.compile_on_meta",
    },
    {"kernels.routing"},
    {"kernels.check_tensor", "kernels.integers"},
]
CPU_LAYERS = [
    {"kernels.cpu.host"},
    {"kernels.cpu.warm"},
    {"kernels.cpu.warm_parts"},
    {"kernels.cpu.compile_plan"},
    {"kernels.cpu.probe"},
    {"kernels.cpu.attention", "kernels.cpu.moe"},
    {"kernels.cpu.layer"},
    {"kernels.cpu.gemm"},
    {"kernels.cpu.codec"},
    {"kernels.cpu.simd"},
    {"kernels.cpu.compile", "kernels.cpu.deferred_codegen"},
]
GPU_LAYERS = [
    {"kernels.gpu.moe"},
    {
        "kernels.gpu.attention",
        "kernels.gpu.kv",
        "kernels.gpu.rows",
        "kernels.gpu.sampling",
    },
    {"kernels.gpu.gemm"},
]
# The imports of a worker on CUDA with an uncompressed checkpoint and uncompressed KV.
CUDA_WORKER = """
import sys
import kernels.device, kernels.host_codec, kernels.ops
import services.worker.worker, shared.engine.engine, shared.engine.executors.cuda.cuda_executor
import shared.engine.executors.load, shared.engine.kv.kv_cache
import shared.engine.layers.fused_layer, shared.engine.models.decoder
import shared.engine.sampling.sampler, shared.engine.weights.load
import shared.engine.weights.shared_weights, shared.engine.weights.weight_form
print(sorted(name for name in sys.modules if name == "numba" or name.startswith("kernels.cpu")))
"""


def imports(folder: str) -> Iterator[tuple[str, str]]:
    """(module, imported name) for every file of a folder, including imports inside functions."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((module, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((module, f"{node.module}.{alias.name}") for alias in node.names)


def layer_of(name: str, layers: list[set[str]]) -> tuple[int, str] | None:
    for layer, members in enumerate(layers):
        for member in members:
            if name == member or name.startswith(f"{member}."):
                return layer, member
    return None


def offenders(folder: str, layers: list[set[str]]) -> list[str]:
    found = []
    for module, name in imports(folder):
        source, target = layer_of(module, layers), layer_of(name, layers)
        if source and target and source != target and target[0] <= source[0]:
            found.append(f"{module} imports {name}")
    return found


def test_no_folder_imports_upward() -> None:
    assert offenders("kernels", LAYERS) == []
    assert offenders("kernels/cpu", CPU_LAYERS) == []
    assert offenders("kernels/gpu", GPU_LAYERS) == []


def test_every_module_has_a_layer() -> None:
    entries = [*ROOT.glob("kernels/*"), *ROOT.glob("kernels/cpu/*"), *ROOT.glob("kernels/gpu/*")]
    names = {
        ".".join(each.relative_to(ROOT).with_suffix("").parts)
        for each in entries
        if each.stem != "__init__" and (each.suffix == ".py" or any(each.glob("*.py")))
    }
    known = set().union(*LAYERS, *CPU_LAYERS, *GPU_LAYERS)
    assert names - known == set()


def test_shared_imports_only_five_kernels_modules() -> None:
    names = ("ops", "device", "host_codec", "cache", "compile_on_meta")
    allowed = tuple(f"kernels.{name}." for name in names)
    found = [
        f"{module} imports {name}"
        for module, name in imports("shared")
        if name.startswith("kernels") and not f"{name}.".startswith(allowed)
    ]
    assert found == []


def test_cuda_worker_does_not_load_numba() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CUDA_WORKER], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == "[]"
