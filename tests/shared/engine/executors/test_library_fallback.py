"""A host whose CPU kernels cannot be compiled uses the reference kernels and does not abort."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernels import ops
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from shared.engine.executors.load import load_executor
from shared.engine.step import SamplingInputs, StepInputs, sampling_rows

ROOT = Path(__file__).resolve().parents[4]
PROMPT = range(300, 480)


def step(tokens: list[int], context_len: int) -> StepInputs:
    count = len(tokens)
    positions = np.arange(context_len - count, context_len)
    return StepInputs(
        input_ids=np.array(tokens),
        positions=positions,
        slot_mapping=positions[None],
        query_lens=np.array([count]),
        context_lens=np.array([context_len]),
        block_tables=np.arange(13)[None, None],
        sampling=SamplingInputs(logits_indices=np.array([count - 1]), rows=sampling_rows(1)),
    )


async def generated() -> list[int]:
    """Greedy tokens of the demo model in FP32."""
    executor = load_executor(DEMO_MODEL_DIR, dtype="float32", kv_cache_bytes=1 << 24, num_threads=1)
    tokens = new = [*PROMPT]
    for _ in range(16):
        new = (await executor.run(step(new, len(tokens)))).token_ids
        tokens = tokens + new
    await executor.close()
    return [int(each) for each in tokens[len(PROMPT) :]]


def print_generated() -> None:
    """In a child: the tokens, the module of an operation, and how much was compiled here."""
    found = asyncio.run(generated())
    from numba.core.registry import CPUDispatcher

    num_compiled = sum(
        sum(each.stats.cache_misses.values())
        for name, module in list(sys.modules.items())
        if name.startswith("kernels.cpu.")
        for each in vars(module).values()
        if isinstance(each, CPUDispatcher)
    )
    print(json.dumps([found, ops.rms_norm.on_cpu.__module__, num_compiled]))


@pytest.mark.long  # compiles for another CPU
@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="Triton computes")
def test_generic_cpu_target_generates_the_same_tokens() -> None:
    """Compares greedy tokens in FP32; the logits differ in the last bits only."""
    child = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import print_generated; print_generated()"],
        cwd=ROOT,
        env={**os.environ, "NUMBA_CPU_NAME": "generic"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    tokens, backend, num_compiled = json.loads(child.stdout.splitlines()[-1])
    assert (backend, num_compiled) == ("kernels.reference.rms_norm", 0)
    assert (child.stdout + child.stderr).count("cpu_kernels_unavailable") == 1
    expected = asyncio.run(generated())
    assert ops.rms_norm.on_cpu.__module__ == "kernels.cpu.layer.rms_norm"
    assert tokens == expected
    assert len(set(tokens)) > 1
