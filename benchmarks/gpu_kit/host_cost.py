"""The host's time for a decode step of Llama-3.1-8B's kernels: microseconds per launch.

The launches of a step are issued without waiting, one after the other, through the wrappers that
the engine calls; the products of the batch-invariant mode use Hearth's kernels, one launch each.
Layers share the memory of weights: only the host is timed. A fixed Python loop is timed as well, to
compare hosts. Under a fake driver the driver's own part is excluded, every kernel is launched once,
and compiled kernels are counted: batches of 1 to 256 rows should need few.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu_kit import roofline
from benchmarks.gpu_kit.launches import LAUNCHES, Inputs
from benchmarks.gpu_kit.session import Session

BATCHES = (1, 64)
SWEEP = (1, 2, 16, 17, 64, 65, 256)
REPETITIONS, DRY_REPETITIONS = 20, 3
BLOCK_SIZE, CONTEXT = 16, 2048
LOOP = 100_000  # iterations of the fixed loop
EPS = 1e-5


class DecodeStep:
    """The kernels of one step, in the engine's order. Tensors are uninitialised."""

    def __init__(self, device: torch.device, batch: int) -> None:
        config = roofline.CONFIG
        self.num_layers = config["num_hidden_layers"]
        kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
        self.num_all_heads, self.head_dim = config["num_attention_heads"] + 2 * kv_heads, head_dim
        num_blocks = -(-CONTEXT // BLOCK_SIZE)

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.weights = [empty(n, k) for n, k in roofline.layer_shapes(config)]
        self.head = empty(config["vocab_size"], config["hidden_size"])
        self.norm = empty(config["hidden_size"])
        self.hidden = empty(batch, config["hidden_size"]).zero_()
        self.angles = torch.zeros(batch, head_dim // 2, device=device)
        self.cache = empty(2, num_blocks, kv_heads, BLOCK_SIZE, head_dim)
        self.tables = torch.zeros(batch, num_blocks, dtype=torch.int64, device=device)
        self.lens = torch.full((batch,), CONTEXT, device=device)
        self.slots = torch.full((batch,), -1, device=device)

    def launch(self) -> None:
        from kernels.gpu.attention.decode_attention import decode_attention
        from kernels.gpu.gemm.linear import linear
        from kernels.gpu.kv.rotate_and_store import rotate_and_store
        from kernels.gpu.rows.add_rms_norm import add_rms_norm
        from kernels.gpu.rows.rms_norm import rms_norm
        from kernels.gpu.rows.silu_and_mul import silu_and_mul

        exact = {"is_batch_invariant": True}
        qkv, out, gate_up, down = self.weights
        residual = self.hidden
        x = rms_norm(residual, self.norm, EPS)
        for _ in range(self.num_layers):
            heads = linear(x, qkv, **exact).view(-1, self.num_all_heads, self.head_dim)
            query = rotate_and_store(heads, self.angles, self.angles, self.cache, self.slots)
            paged = self.cache, self.tables, self.lens
            attended = decode_attention(query, *paged, 0.1, **exact)
            x = linear(attended.flatten(1), out, **exact)
            x, residual = add_rms_norm(x, residual, self.norm, EPS)
            x = linear(silu_and_mul(linear(x, gate_up, **exact)), down, **exact)
            x, residual = add_rms_norm(x, residual, self.norm, EPS)
        linear(x, self.head, **exact)


def run(session: Session) -> None:
    loop_s = _median(lambda: sum(range(LOOP)), REPETITIONS)
    session.add(case="fixed loop", us=round(loop_s * 1e6, 1))
    with session.launching() as device, torch.inference_mode():
        for batch in BATCHES:
            step = DecodeStep(device, batch)
            num_launches = _count(step.launch)
            step_s = _median(step.launch, DRY_REPETITIONS if session.is_dry else REPETITIONS)
            session.add(
                case=f"decode step, batch {batch}",
                launches=num_launches,
                ms=round(step_s * 1e3, 3),
                us_per_launch=round(step_s / num_launches * 1e6, 2),
                of_fixed_loop=round(step_s / loop_s, 2),
            )
        if session.is_dry:
            for launch in LAUNCHES.values():
                launch(Inputs(device))
            session.add(case="launches", ops=list(LAUNCHES))
            _count_compiled(session, device)


def _median(
    launch: Callable[[], object], repetitions: int, session: Session | None = None
) -> float:
    """The host's time in seconds; the device is idle before each launch."""
    took = []
    for _ in range(repetitions):
        if session is not None and not session.is_dry:
            torch.cuda.synchronize()
        started = time.perf_counter()
        launch()
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def _count(launch: Callable[[], None]) -> int:
    """Counts the Triton launches of one call, which also compiles new kernels."""
    from triton.runtime.jit import JITFunction

    run, num_launches = JITFunction.run, 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal num_launches
        num_launches += 1
        return run(*args, **kwargs)

    JITFunction.run = counted
    try:
        launch()
    finally:
        JITFunction.run = run
    return num_launches


def _count_compiled(session: Session, device: torch.device) -> None:
    """Kernels that the sweep's batches compile, by name; requests would have to wait for these."""
    from triton.runtime import driver

    fake = driver.active
    before = len(fake.compiled)
    for batch in SWEEP:
        step = DecodeStep(device, batch)
        step.num_layers = 1
        step.launch()
    compiled = Counter(each.name for each in fake.compiled[before:])
    session.add(case="compiled kernels", batches=SWEEP, total=compiled.total(), **compiled)
