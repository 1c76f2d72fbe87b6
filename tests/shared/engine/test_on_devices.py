"""The engine on every device: loading, forks, preemption, moved KV, and a too large KV cache.

Cases on the CPU always run; `pytest -m gpu` runs the cases on GPUs.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.engine import Engine
from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.step import KvRun
from shared.errors import HearthError
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.rig import new_sequence, seeded
from tests.support.engine.steps import Blocks, generate

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # layers, keys and values, tokens, heads, head_dim, FP32
PROMPT = torch.randint(3, 199, (45,), generator=torch.Generator().manual_seed(7)).tolist()
NUM_NEW = 20


def cuda(index: int) -> object:
    is_missing = torch.cuda.device_count() <= index
    skipped = pytest.mark.skipif(is_missing, reason=f"there is no cuda:{index}")
    return pytest.param(f"cuda:{index}", marks=[pytest.mark.gpu, skipped])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, hidden_size=64, head_dim=16)
    return folder


@pytest.fixture(params=["cpu", cuda(0), cuda(1)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(folder: Path, device: str, *, num_blocks: int = 64) -> LocalExecutor:
    return load_executor(
        folder,
        device,
        dtype="float32",
        kv_cache_bytes=num_blocks * BLOCK_BYTES,
        num_threads=1,
    )


class Driver:
    """An engine with an executor, stepped until all sequences finish."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.executor = executor
        self.engine = Engine(
            num_blocks=executor.num_blocks,
            block_size=16,
            max_context_tokens=executor.max_context_tokens,
            max_batch_tokens=32,
            max_sequences=8,
        )
        self.tokens: dict[bytes, list[int]] = defaultdict(list)

    def run(self, *sequences: Sequence) -> list[list[int]]:
        """Runs the sequences. Returns the new tokens of each."""
        for sequence in sequences:
            self.engine.add(sequence)
        asyncio.run(self._run())
        return [self.tokens[each.sequence_id] for each in sequences]

    async def _run(self) -> None:
        while self.engine.batcher.waiting or self.engine.batcher.running:
            rows, _ = self.engine.schedule()
            if not rows:
                return
            output = await self.executor.result(self.executor.submit(rows))
            for progress in self.engine.apply(rows, output):
                self.tokens[progress.sequence.sequence_id] += progress.token_ids
            self.engine.pool.check()


def solo(executor: LocalExecutor, prompt: list[int], *, choice_index: int = 0) -> list[int]:
    return Driver(executor).run(new_sequence(prompt, seeded(NUM_NEW), choice_index=choice_index))[0]


def test_tokens_equal_those_of_the_cpu(model_dir: Path, device: str) -> None:
    executor, cpu_executor = load(model_dir, device), load(model_dir, "cpu")
    found, expected = (
        generate(each, Blocks(each.num_blocks).line(PROMPT, room=NUM_NEW), NUM_NEW)
        for each in (executor, cpu_executor)
    )
    assert found == expected


def test_forked_choices_equal_solo_runs(model_dir: Path, device: str) -> None:
    executor = load(model_dir, device)
    driver, parent = Driver(executor), new_sequence(PROMPT[:-1], None)
    driver.run(parent)
    assert parent.state is SequenceState.HELD
    children = [new_sequence(PROMPT, seeded(NUM_NEW), choice_index=index) for index in range(3)]
    for child in children:
        driver.engine.accept(child)
    driver.engine.fork(parent, children)
    driver.run()
    found = [driver.tokens[child.sequence_id] for child in children]
    assert found == [solo(executor, PROMPT, choice_index=index) for index in range(3)]


def test_preempted_sequences_equal_solo_runs(model_dir: Path, device: str) -> None:
    prompts = [PROMPT, PROMPT[::-1], PROMPT[5:]]
    sequences = [new_sequence(prompt, seeded(NUM_NEW)) for prompt in prompts]
    found = Driver(load(model_dir, device, num_blocks=10)).run(*sequences)
    assert sum(each.num_preemptions for each in sequences) > 0
    roomy = load(model_dir, device)
    assert found == [solo(roomy, prompt) for prompt in prompts]


def test_moved_kv_gives_the_same_tokens(model_dir: Path, device: str) -> None:
    """KV moves through host memory between the scattered blocks of two executors."""
    source, target = load(model_dir, device), load(model_dir, device)
    line = Blocks(source.num_blocks).line(PROMPT, room=NUM_NEW)
    expected = generate(source, line, NUM_NEW)
    moved = Blocks(target.num_blocks, seed=1).line(PROMPT, room=NUM_NEW)

    async def move() -> None:
        wire = bytearray(len(PROMPT) * source.kv_layout.bytes_per_token)
        await source.read_kv(KvRun(line.block_table, 0, len(PROMPT)), memoryview(wire))
        payload = memoryview(bytes(wire))
        await target.write_kv(KvRun(moved.block_table, 0, len(PROMPT)), payload)

    asyncio.run(move())
    moved.num_computed = len(PROMPT) - 1
    assert generate(target, moved, NUM_NEW) == expected


def test_device_is_usable_after_too_large_a_kv_cache(model_dir: Path, device: str) -> None:
    with pytest.raises((HearthError, RuntimeError, MemoryError)):
        load(model_dir, device, num_blocks=1 << 34)
    assert len(solo(load(model_dir, device), PROMPT)) == NUM_NEW
