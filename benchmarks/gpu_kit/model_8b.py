"""A model of Llama-3.1-8B's shape with dummy weights: startup, decode, prefill.

Times are those of `Runner.run`, from the plan of a step to its token ids on the host. `of_roofline`
is the minimum time for the bytes (decode) or operations (prefill) at this machine's ceilings,
divided by the measured one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit import roofline
from benchmarks.gpu_kit.session import NotBuilt, Session

LOADER = "shared.engine.runners.load"
BATCHES = (1, 64, 8, 256)  # the most informative first
CONTEXT = 2048
PROMPT, CHUNKS = 8192, (8192, 2048, 512)
WARM_UP_STEPS, STEPS = 3, 20


def run(session: Session, mode: str) -> None:
    load = loader(session)
    with folder_of(roofline.CONFIG) as folder:
        started = time.perf_counter()
        runner = load(
            folder,
            device="cuda",
            load_format="dummy",
            mode=mode,
            max_batch_tokens=max(CHUNKS),
        )
        start_s = time.perf_counter() - started
    session.add(
        case="start",
        mode=mode,
        seconds=round(start_s, 2),
        kv_tokens=runner.num_blocks * runner.kv_layout.block_size,
        **memory(),
    )
    asyncio.run(measure(session, runner, mode, roofline.CONFIG))


def loader(session: Session) -> Any:
    """`load_runner`, which creates dummy weights. Raises NotBuilt, Unavailable."""
    if find_spec(LOADER) is None:
        raise NotBuilt(f"there is no {LOADER}: no runner with load_format='dummy'")
    session.need_device()
    return import_module(LOADER).load_runner


@contextmanager
def folder_of(config: dict[str, Any]) -> Iterator[Path]:
    """A checkpoint that consists only of its config."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        yield Path(name)


def memory() -> dict[str, float]:
    import torch

    free, total = torch.cuda.mem_get_info()
    return {
        "gib_free": round(free / 2**30, 2),
        "gib_total": round(total / 2**30, 2),
        "gib_peak": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


async def measure(session: Session, runner: Any, mode: str, config: dict[str, Any]) -> None:
    for batch in BATCHES:
        if batch * -(-CONTEXT // runner.kv_layout.block_size) > runner.num_blocks:
            session.add(case=f"decode, batch {batch}", mode=mode, left_out="too few KV blocks")
            continue
        await _decode(session, runner, mode, config, batch)
    if -(-PROMPT // runner.kv_layout.block_size) <= runner.num_blocks:
        for chunk in CHUNKS:
            await _prefill(session, runner, mode, config, chunk)
    await runner.close()


async def _decode(
    session: Session, runner: Any, mode: str, config: dict[str, Any], batch: int
) -> None:
    step = decode_step(batch, CONTEXT, runner.kv_layout.block_size)
    took = [await _seconds(runner, step) for _ in range(WARM_UP_STEPS + STEPS)][WARM_UP_STEPS:]
    step_s = statistics.median(took)
    num_bytes = roofline.decode_bytes(config, batch, CONTEXT)
    session.add(
        case=f"decode, batch {batch}",
        mode=mode,
        tokens_per_s=round(batch / step_s, 1),
        slowest_ms=round(max(took) * 1e3, 3),
        expected_ms=roofline.EXPECTED_DECODE_MS.get(batch),
        **roofline.beside_prediction(num_bytes / session.ceiling("copy_bytes_s"), step_s),
    )


async def _prefill(
    session: Session, runner: Any, mode: str, config: dict[str, Any], chunk: int
) -> None:
    block_size = runner.kv_layout.block_size
    took = []
    for _ in range(3):
        starts = range(0, PROMPT, chunk)
        steps = [prefill_step(start, min(chunk, PROMPT - start), block_size) for start in starts]
        took.append(sum([await _seconds(runner, step) for step in steps]))
    flops = roofline.prefill_flops(config, PROMPT)
    session.add(
        case=f"prefill of {PROMPT} in chunks of {chunk}",
        mode=mode,
        expected_s=roofline.EXPECTED_PREFILL_S.get(chunk),
        **roofline.beside_prediction(flops / session.ceiling("matmul_flops"), min(took)),
    )


async def _seconds(runner: Any, step: Any) -> float:
    started = time.perf_counter()
    await runner.run(step)
    return time.perf_counter() - started


def decode_step(batch: int, context: int, block_size: int) -> Any:
    """One new token for each sequence, at the end of its context; all sample greedily."""
    import numpy as np

    width = -(-context // block_size)
    blocks = np.random.default_rng(0).permutation(batch * width)
    tables = blocks.reshape(batch, width).astype(np.int64)
    last = context - 1
    slots = tables[:, last // block_size] * block_size + last % block_size
    return _step(
        positions=np.full(batch, last),
        slots=slots,
        query_lens=np.ones(batch),
        context_lens=np.full(batch, context),
        tables=tables,
        drawing=np.arange(batch),
    )


def prefill_step(start: int, num_tokens: int, block_size: int) -> Any:
    """A prompt's tokens [start, start + num_tokens), in consecutive blocks; the last samples."""
    import numpy as np

    end = start + num_tokens
    return _step(
        positions=np.arange(start, end),
        slots=np.arange(start, end),
        query_lens=np.array([num_tokens]),
        context_lens=np.array([end]),
        tables=np.arange(-(-end // block_size))[None],
        drawing=np.array([num_tokens - 1]),
    )


def _step(
    *, positions: Any, slots: Any, query_lens: Any, context_lens: Any, tables: Any, drawing: Any
) -> Any:
    import numpy as np

    from shared.engine.runner import SamplingInputs, StepInputs

    num_rows, i64, f32 = len(drawing), np.int64, np.float32
    token_ids = np.random.default_rng(1).integers(3, 1000, len(positions))
    return StepInputs(
        input_ids=token_ids.astype(i64),
        positions=positions.astype(i64),
        slot_mapping=slots.astype(i64)[None],
        query_lens=query_lens.astype(i64),
        context_lens=context_lens.astype(i64),
        block_tables=tables.astype(i64)[None],
        sampling=SamplingInputs(
            logits_indices=drawing.astype(i64),
            temperature=np.zeros(num_rows, f32),
            top_k=np.zeros(num_rows, i64),
            top_p=np.ones(num_rows, f32),
            min_p=np.zeros(num_rows, f32),
            seed=np.zeros(num_rows, np.uint64),
            choice_index=np.zeros(num_rows, i64),
            output_position=np.zeros(num_rows, i64),
        ),
    )
