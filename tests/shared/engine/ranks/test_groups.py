"""Groups of real rank processes compute the bits of one process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.ranks.group_runner import GroupRunner
from shared.engine.ranks.load_group import load_group
from shared.engine.runner import LogitBias, Penalties, PromptSuccessors, StepInputs, TokenMasks
from shared.engine.runners.load import load_runner
from shared.engine.runners.model_runner import ModelRunner
from shared.errors import CheckpointError, ConfigError, DeviceFailed
from tests.shared.engine.support.checkpoints import write_llama
from tests.shared.engine.support.steps import Blocks, Line, step_of

VOCAB_SIZE = 320
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
OPTIONS = {"dtype": "bfloat16", "kv_cache_bytes": 8 << 20, "num_threads": 2}
PROMPT = [(7 * n) % VOCAB_SIZE for n in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, **SHAPE)
    return folder


@pytest.fixture(scope="module")
def single(folder: Path) -> ModelRunner:
    return load_runner(folder, **OPTIONS)


@pytest.fixture(
    scope="module", params=[MeshShape(2, 1), MeshShape(2, 2)], ids=["tp 2", "tp 2 x pp 2"]
)
def group(request: pytest.FixtureRequest, folder: Path) -> Iterator[GroupRunner]:
    runner = load_group(folder, "cpu", request.param, **OPTIONS)
    yield runner
    asyncio.run(runner.close())


class SomeTokens:
    """A mask that allows tokens 5 to 9."""

    def wait(self, timeout_s: float) -> np.ndarray:
        words = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
        words[0] = 0b1111100000
        return words


class LateTokens:
    """A mask that is never ready."""

    def wait(self, timeout_s: float) -> None:
        return None


def with_all_options(step: StepInputs) -> StepInputs:
    """Row 0 gets a bias and penalties, row 1 a mask, row 2 a late one; all get logprobs."""
    rows = np.zeros(1, np.int64)
    value = np.full(1, 1.5, np.float32)
    penalties = Penalties(rows, rows + 3, repetition=value, subtracted=value)
    sampling = msgspec.structs.replace(
        step.sampling,
        temperature=np.full(step.sampling.num_rows, 0.9, np.float32),
        top_p=np.full(step.sampling.num_rows, 0.95, np.float32),
        masks=TokenMasks(np.array([1, 2]), (SomeTokens(), LateTokens())),
        bias=LogitBias(rows, rows + 4, value),
        penalties=penalties,
        raw_logprobs={0: 3, 1: 2},
        processed_logprobs={3: 4},
    )
    successors = {0: PromptSuccessors(np.array(PROMPT[1:20]), 2)}
    return msgspec.structs.replace(step, sampling=sampling, prompt_logprobs=successors)


def steps_of(lines: list[Line]) -> list[StepInputs]:
    """Chunks of a prompt beside another one, then decode steps of both; every token has logits."""
    first, second = lines
    steps = []
    for work in ([(first, 20)], [(first, 33), (second, 7)], [(first, 1), (second, 1)]):
        steps.append(step_of(work))
        for line, num_new in work:
            line.num_computed += num_new
    return [with_all_options(steps[0]), *steps[1:]]


def lines_of(num_blocks: int) -> list[Line]:
    blocks = Blocks(num_blocks)
    return [blocks.line(PROMPT), blocks.line(PROMPT[30:50])]


async def test_steps_have_the_same_results_as_in_one_process(
    single: ModelRunner, group: GroupRunner
) -> None:
    for ours, theirs in zip(
        steps_of(lines_of(group.num_blocks)), steps_of(lines_of(group.num_blocks)), strict=True
    ):
        expected, found = await single.run(ours), await group.run(theirs)
        assert found == expected
        assert not ours.sampling.masks or expected.late_rows == {2}


async def test_keys_and_values_are_those_of_one_process(
    single: ModelRunner, group: GroupRunner
) -> None:
    """They are read and written in the layout of the whole model."""
    line = lines_of(group.num_blocks)[0]
    step, num_bytes = step_of([(line, 45)]), 45 * single.kv_layout.bytes_per_token
    await single.run(step)
    await group.run(step)
    expected, found = bytearray(num_bytes), bytearray(num_bytes)
    await single.read_kv(line.block_table, 0, 45, memoryview(expected))
    await group.read_kv(line.block_table, 0, 45, memoryview(found))
    assert found == expected and any(found)
    table = line.block_table[::-1]
    await group.write_kv(table, 3, 42, memoryview(found)[: 42 * single.kv_layout.bytes_per_token])
    again = bytearray(42 * single.kv_layout.bytes_per_token)
    await group.read_kv(table, 3, 42, memoryview(again))
    assert again == found[: len(again)]
    await group.zero_blocks(line.block_table)
    await group.read_kv(line.block_table, 0, 45, memoryview(found))
    assert not any(found)
    with pytest.raises(ValueError, match="lie outside"):
        outside = bytearray(4096 * single.kv_layout.bytes_per_token)
        await group.read_kv(line.block_table, 0, 4096, memoryview(outside))


async def test_group_describes_the_whole_model(single: ModelRunner, group: GroupRunner) -> None:
    for name in ("revision", "kv_layout", "numerics", "vocab_size", "max_context_tokens"):
        assert getattr(group, name) == getattr(single, name)
    await group.check()
    (link,) = group.group.links  # of two ranks of this host
    assert 0 < link.link.latency_s < 0.1


async def test_sums_in_bf16_are_those_of_one_process(folder: Path) -> None:
    rounded = load_runner(folder, activations="bf16-exchange", **OPTIONS)
    group = load_group(folder, "cpu", MeshShape(2), activations="bf16-exchange", **OPTIONS)
    steps = [steps_of(lines_of(group.num_blocks))[0] for _ in range(2)]
    assert await group.run(steps[0]) == await rounded.run(steps[1])
    assert group.numerics == rounded.numerics
    await group.close()


async def test_killed_rank_ends_the_group(folder: Path) -> None:
    """It is noticed without a step."""
    runner = load_group(folder, "cpu", MeshShape(1, 2), **OPTIONS)
    await runner.check()
    os.kill(runner.group.pids[0], signal.SIGKILL)
    async with asyncio.timeout(5):
        while not runner.has_ended:
            await asyncio.sleep(0.01)
    with pytest.raises(DeviceFailed, match="a rank of this worker is lost"):
        await runner.check()
    await runner.close()


async def test_frozen_rank_ends_the_group_within_the_budget_of_a_step(folder: Path) -> None:
    runner = load_group(folder, "cpu", MeshShape(1, 2), **OPTIONS)
    step = step_of([(lines_of(runner.num_blocks)[0], 5)])
    await runner.run(step)
    os.kill(runner.group.pids[0], signal.SIGSTOP)
    began_at = time.monotonic()
    with pytest.raises(DeviceFailed, match="a rank of this worker is lost"):
        await runner.run(step)
    assert time.monotonic() - began_at < 2 * runner.step_budget_s(step) + 1
    assert runner.has_ended
    await runner.close()


def test_checkpoint_that_cannot_be_cut_is_an_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="3 layers cannot form 4 stages"):
        load_group(folder, "cpu", MeshShape(1, 4), **OPTIONS)


def test_bad_checkpoint_is_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="no such file"):
        load_group(tmp_path, "cpu", MeshShape(2, 1), **OPTIONS)
