"""Decode steps through a rank process, beside those of this process, and the loss of that process.

By turns, with the same sequences: tokens are equal in the exact mode, times differ by what plans
and answers cost. A few layers of the 8B shape: their short steps leave the host little time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.models.model_8b import folder_of
from benchmarks.gpu_kit.session import Session

LAYERS = {"device": 8, "dry": 1, "compile": 2}
KV_BYTES = 4 << 30  # of each process
ROWS, ROUNDS = (1, 16, 64), 3
NUM_PROMPT, NUM_TOKENS = 64, 150
LOSS_LIMIT_S = 5.0


def run(session: Session) -> None:
    """Raises RuntimeError if a token differs, or if the loss of the process stays unknown."""
    asyncio.run(_run(session))


async def _run(session: Session) -> None:
    from benchmarks.gpu_kit.model_steps.loading import load

    config = session.shapes.config | {"num_hidden_layers": LAYERS[session.mode]}
    with folder_of(config) as folder:
        if session.is_dry:
            executor, _ = load(session, folder, "exact")
            await _decoded(executor, 1, num_tokens=2)
            return
        executors = await asyncio.to_thread(_load_both, session, folder)
    for rows in ROWS:
        for _ in range(ROUNDS):
            found = {case: await _decoded(each, rows) for case, each in executors.items()}
            for case, (step_ms, _) in found.items():
                session.add(case=case, rows=rows, measured_ms=round(step_ms, 3))
            first, second = (tokens for _, tokens in found.values())
            if first != second:
                raise RuntimeError(f"{rows} rows have other tokens through a rank process")
    await _lose(session, executors["rank process"])
    for each in executors.values():
        await each.close()


def _load_both(session: Session, folder: Path) -> dict[str, Any]:
    from shared.engine.executors.group.load_group import load_group
    from shared.engine.executors.load import load_executor
    from shared.engine.parallel.mesh_shape import MeshShape

    options: dict[str, Any] = {
        "load_format": "dummy",
        "mode": "exact",
        "block_size": session.shapes.block_size,
        "kv_cache_bytes": KV_BYTES,
    }
    return {
        "this process": load_executor(folder, "cuda", **options),
        "rank process": load_group(folder, "cuda", MeshShape(1, 1), **options),
    }


async def _decoded(
    executor: Any, num_rows: int, num_tokens: int = NUM_TOKENS
) -> tuple[float, dict[int, list[int]]]:
    """Returns the milliseconds of a decode step, and the tokens of each row."""
    from shared.messages import SamplingParams
    from tests.support.engine.model_worker import Worker
    from tests.support.engine.rig import new_sequence

    worker = Worker(Path(), "bfloat16", executor=executor, budget=512)
    sequences = []
    for n in range(num_rows):
        prompt = [(7 * k + n * k) % 400 + 3 for k in range(NUM_PROMPT)]
        sampling = SamplingParams(seed=n, max_tokens=num_tokens, temperature=0.8)
        sequences.append(new_sequence(prompt, sampling))
        worker.engine.add(sequences[-1])
    while not all(worker.tokens[each.sequence_id] for each in sequences):
        await worker.turn()
    num_steps, began_at = 0, time.perf_counter()
    while await worker.turn():
        num_steps += 1
    step_ms = 1e3 * (time.perf_counter() - began_at) / max(1, num_steps)
    await executor.forget_ended()
    return step_ms, {n: worker.tokens[each.sequence_id] for n, each in enumerate(sequences)}


async def _lose(session: Session, rank: Any) -> None:
    """Kills the process. Records after how long its leader knows."""
    os.kill(rank.pids[0], signal.SIGKILL)
    began_at = time.perf_counter()
    while not rank.has_ended:
        if time.perf_counter() - began_at > LOSS_LIMIT_S:
            raise RuntimeError(f"the loss of the rank is unknown after {LOSS_LIMIT_S:g} s")
        await asyncio.sleep(0.001)
    session.add(case="killed", known_after_ms=round(1e3 * (time.perf_counter() - began_at), 1))
