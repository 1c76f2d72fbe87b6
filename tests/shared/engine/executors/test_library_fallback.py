"""A host whose CPU kernels cannot be compiled uses the reference kernels and does not abort."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
GENERATE = """
import asyncio, json, sys
import numpy as np
from shared.engine.executors.load import load_executor
from shared.engine.step import SamplingInputs, StepInputs, sampling_rows

options = {"dtype": "float32", "kv_cache_bytes": 1 << 24, "num_threads": 1}
executor = load_executor("shared/demo_model", **options)

def step(tokens, context_len):
    count = len(tokens)
    at = np.arange(context_len - count, context_len)
    one = lambda value, dtype: np.array([value], dtype=dtype)
    return StepInputs(
        input_ids=np.array(tokens), positions=at, slot_mapping=at[None],
        query_lens=one(count, np.int64), context_lens=one(context_len, np.int64),
        block_tables=np.arange(13)[None, None],
        sampling=SamplingInputs(
            logits_indices=one(count - 1, np.int64), rows=sampling_rows(1)
        ),
    )

async def generate():
    tokens = list(range(300, 480))  # long enough to be computed by rows, later
    new = tokens
    for _ in range(16):
        output = await executor.run(step(new, len(tokens)))
        new = output.token_ids
        tokens = tokens + new
    await executor.close()
    return tokens

found = [int(each) for each in asyncio.run(generate())]
from numba.core.registry import CPUDispatcher
from kernels import ops
num_compiled = sum(
    sum(each.stats.cache_misses.values())
    for name, module in list(sys.modules.items()) if name.startswith("kernels.cpu.")
    for each in vars(module).values() if isinstance(each, CPUDispatcher)
)
print(json.dumps([found, ops.rms_norm.on_cpu.__module__, num_compiled]))
"""


def _generate(**environ: str) -> tuple[list[int], str, str]:
    child = subprocess.run(
        [sys.executable, "-c", GENERATE],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    *logged, last = child.stdout.strip().splitlines()
    tokens, module, num_compiled = json.loads(last)
    assert num_compiled == 0  # child processes compile; this process only loads
    return tokens, module, "\n".join(logged) + child.stderr


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="Triton computes")
def test_generic_cpu_target_generates_the_same_tokens() -> None:
    """Compares greedy tokens in FP32; the logits differ in the last bits only."""
    compiled, backend, logged = _generate()
    assert (backend, logged.count("cpu_kernels_unavailable")) == ("kernels.cpu.layer.rms_norm", 0)
    tokens, backend, logged = _generate(NUMBA_CPU_NAME="generic")
    assert (backend, logged.count("cpu_kernels_unavailable")) == ("kernels.reference.rms_norm", 1)
    assert tokens == compiled
    assert len(set(tokens[180:])) > 1
