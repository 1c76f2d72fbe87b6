"""The number of threads of a step depends on the size of its work."""

from __future__ import annotations

from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from shared.engine.executors.load import load_executor
from shared.engine.executors.step_threads import StepThreads
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.steps import Blocks, step_of
from tests.support.threads import computing_threads

LARGE, SMALL = 125_000_000, 100_000


@pytest.mark.parametrize(
    ("num_weights", "num_tokens", "expected"),
    [
        (SMALL, 1, 1),
        (SMALL, 64, 1),
        (SMALL, 4096, 2),
        (LARGE, 1, 2),  # reading the weights takes long
    ],
)
def test_small_steps_use_one_thread(num_weights: int, num_tokens: int, expected: int) -> None:
    with computing_threads(2):
        StepThreads(2, num_weights, torch.float32).set_for(num_tokens)
        assert (torch.get_num_threads(), numba.get_num_threads()) == (expected, expected)


def test_experts_count_as_far_as_tokens_use_them() -> None:
    """One of 32 experts of a token: few weights are read for one token, all for many."""
    threads = StepThreads(2, SMALL, torch.float32, expert_weights=32_000_000, expert_share=1 / 32)
    alone = StepThreads(2, SMALL + 1_000_000, torch.float32)
    assert threads.seconds_alone(1) == alone.seconds_alone(1)
    assert threads.seconds_alone(32) > 20 * threads.seconds_alone(1)
    assert threads.seconds_alone(64) < 2 * threads.seconds_alone(32)


def test_custom_gemm_uses_two_threads_for_smaller_steps() -> None:
    with computing_threads(2):
        threads = StepThreads(2, 4_400_000, torch.float32, has_custom_gemm=True)
        threads.set_for(16)
        assert (torch.get_num_threads(), numba.get_num_threads()) == (1, 2)
        threads.set_for(1)
        assert (torch.get_num_threads(), numba.get_num_threads()) == (1, 1)


def test_never_more_threads_than_configured() -> None:
    with computing_threads(2):
        StepThreads(1, LARGE, torch.bfloat16).set_for(4096)
        assert torch.get_num_threads() == 1


def test_torch_uses_one_thread_beside_a_custom_gemm() -> None:
    with computing_threads(2):
        StepThreads(2, LARGE, torch.bfloat16, has_custom_gemm=True).set_for(1)
        assert (torch.get_num_threads(), numba.get_num_threads()) == (1, 2)


async def test_runner_uses_more_threads_for_large_steps(tmp_path: Path) -> None:
    """Reads the number on the step thread, because each thread has its own."""
    write_llama(tmp_path, max_position_embeddings=4096)
    executor = load_executor(tmp_path, dtype="float32", kv_cache_bytes=64 << 20, num_threads=2)
    blocks, seen = Blocks(executor.num_blocks), []
    for num_tokens in (8, 3000, 8):
        prompt = np.arange(num_tokens) % 150 + 3
        await executor.run(step_of([(blocks.line(prompt.tolist()), num_tokens)]))
        seen.append(executor._step_thread.submit(torch.get_num_threads).result())
    assert seen == [1, 2, 1]
    await executor.close()
