"""A worker of any family on CUDA without a device, which records the kernels that it needs.

Its own code starts it and computes its steps; launches are recorded (see `recording`), and nothing
is compiled. What a kernel would have written is zero, or whatever lay in memory; the rows of
experts are drawn, as an expert without a row launches nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_kit.dry.dry_tensors import library_products
from kernels import ops
from kernels.gpu.gemm.fused_rows import NUM_ROWS
from kernels.gpu.moe import expert_rows
from kernels.torch_ops.expert_rows import sort_by_expert
from shared.engine.executors.cuda import cuda_executor
from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.step_computer import StepComputer
from shared.engine.step import KvRun
from shared.kv_layout import KvLayout, KvShard
from shared.numerics import Activations, Mode
from tests.kernels.compiled.launch_classes import recording
from tests.kernels.worker_keys.steps import Steps
from tests.shared.engine.executors.cuda.fake_device import INDEX, FakeDriver, Replays
from tests.support.engine.families import FAMILIES, Family
from tests.support.engine.quantized import quantize
from tests.support.kernels.triton_ops import triton_ops

FORMS = ("dense", "dense", "compressed", "int4", "fp8")  # of weights
UNSIZED = {"moe_layers", "kv_lora_rank", "original_max_position_embeddings"}
# Their sizes are options, and multiples of a group.
WIDE_FAMILIES = [
    name
    for name, each in FAMILIES.items()
    if type(each) is Family
    and not UNSIZED & each.fields.keys()
    and not any("expert" in field for field in each.fields)
]
# Compressed weights need whole groups.
WIDE = {"hidden_size": 192, "intermediate_size": 640, "num_attention_heads": 6}
DTYPES = ("bfloat16", "bfloat16", "float16", "float32")
LARGE_BYTES = 1 << 34  # a cache whose strides exceed 2^31 elements
MAX_GRAPHS = 1000


@dataclass(frozen=True)
class Case:
    family: str
    mode: Mode
    seed: int

    def __str__(self) -> str:
        return f"{self.family}-{self.mode}-{self.seed}"

    @property
    def rng(self) -> Random:
        return Random(str(self))

    def written(self, folder: Path) -> tuple[Path, LoadOptions]:
        """Writes a checkpoint. Returns its directory and the options of a worker."""
        rng = self.rng
        model, family = folder / "model", FAMILIES[self.family]
        is_wide = self.family in WIDE_FAMILIES
        form = rng.choice(FORMS if is_wide else FORMS[:3])
        family.write(model, **(WIDE if is_wide and form != "dense" else {}))
        if form in ("int4", "fp8"):
            model = quantize(model, folder / form, form)
        options = LoadOptions(
            dtype="bfloat16" if form != "dense" else rng.choice(DTYPES),
            mode=self.mode,
            weights="compressed" if form == "compressed" else "dense",
            kv_dtype=rng.choice(("auto", "fp8")),
            block_size=rng.choice((16, 64)),
            activations=rng.choice(get_args(Activations)),
            max_batch_tokens=rng.choice((2, 33, 64, 512, 1024, 2048)),
            max_sequences=rng.choice((1, 5, 16, 60, 256)),
            kv_cache_bytes=rng.randint(1 << 20, 1 << 22),
        )
        return model, options


@contextmanager
def started(case: Case, folder: Path) -> Iterator[tuple[CudaExecutor, LoadOptions, dict[str, Any]]]:
    """Yields a worker's executor when it is ready, its options, and the launch classes so far."""
    torch.manual_seed(case.seed)
    rng = case.rng
    model, options = case.written(folder)
    most = rng.choice((0, *NUM_ROWS))
    with ExitStack() as stack:
        stack.enter_context(triton_ops())
        stack.enter_context(library_products())
        stack.enter_context(patch.object(ops, "fused_rows", lambda *_: most, create=True))
        stack.enter_context(patch.object(StepComputer, "_check_routing", lambda *_: None))
        vars(ops.sort_by_expert)["on_cpu"] = _drawn_rows
        found = stack.enter_context(recording())
        device = CudaDevice(INDEX, torch.device("cpu"), FakeDriver(), lambda _: None)
        executor = CudaExecutor.load(model, options, device)
        yield executor, options, found
        asyncio.run(executor.close())


def _drawn_rows(ids: Tensor, num_experts: int, sums: Tensor | None = None) -> Any:
    expert_rows.sort_by_expert(ids, num_experts, sums)
    return sort_by_expert(torch.randint(num_experts, ids.shape), num_experts)


def run_everything(case: Case, executor: CudaExecutor, options: LoadOptions, count: int) -> None:
    """Does all that a worker does once it is ready, `count` times each but the costly."""
    layout, rng = executor.kv_layout, case.rng
    steps = Steps(rng, options, len(layout.groups), executor.vocab_size)
    asyncio.run(executor.check())
    for step in steps.draw(count):
        executor.computer.run(step)
    for _ in range(count // 4 + 1):
        _copy_kv(executor.computer, layout, rng)
    executor.computer.zero_blocks([0, 1])
    executor.computer.use_graphs(Replays(), max_rows=steps.max_rows, max_graphs=MAX_GRAPHS)
    for _ in range(count // 2 + 1):
        step = steps.decodes()
        executor.computer.run(step)
        executor.computer.run(step)  # by a graph
    executor.computer.capture_next()
    _resize(executor, LARGE_BYTES // layout.block_bytes)
    for step in steps.draw(0):
        executor.computer.run(step)
    _copy_kv(executor.computer, layout, rng)


def _resize(executor: CudaExecutor, num_blocks: int) -> None:
    """Parks and wakes the worker, with another size of the cache."""

    def allocate(layout: KvLayout, num: int, device: torch.device) -> Tensor:
        planes, heads, dim = layout.state.row
        shape = layout.num_slots, planes, num, heads, layout.block_size, dim
        return torch.zeros(shape, dtype=getattr(torch, layout.dtype))  # that are not touched

    asyncio.run(executor.resize_kv(0))
    with patch.object(cuda_executor, "allocate_kv_cache", allocate):
        asyncio.run(executor.resize_kv(num_blocks))


def _copy_kv(computer: StepComputer, layout: KvLayout, rng: Random) -> None:
    group = rng.randrange(len(layout.groups))
    num_layers, num_heads = len(layout.groups[group].layers), layout.state.row[1]
    shard = None
    if rng.random() < 0.5:
        first = rng.randrange(num_layers)
        shard = KvShard(first, rng.randint(1, num_layers - first), 0, rng.randint(1, num_heads))
    first_token, num_tokens = rng.choice(((0, 1), (0, 16), (3, 20), (16, 300), (1, 64)))
    table = [0, 1] * 40
    run = KvRun(table, first_token, num_tokens, group, shard)
    num_cells = num_layers * num_heads if shard is None else shard.num_cells
    wire = memoryview(bytearray(num_tokens * num_cells * layout.cell_bytes))
    computer.read_kv(run, wire)
    computer.write_kv(run, wire)
