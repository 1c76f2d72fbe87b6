"""Real rank processes that share experts compute the bits of one process; bad input fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine.engine import Engine
from shared.engine.executors.executor import Executor
from shared.engine.executors.group.group_executor import GroupExecutor
from shared.engine.executors.group.load_group import load_group
from shared.engine.executors.load import load_executor
from shared.engine.parallel.mesh_shape import MeshShape
from shared.errors import StepFailed
from shared.messages import SamplingParams
from tests.shared.engine.executors.group.test_groups import OPTIONS, PROMPT, SHAPE, progress_of
from tests.support.engine.checkpoints import write_model
from tests.support.engine.rig import new_sequence

BAD_TOKEN = 319  # in no prompt of `progress_of`: its embedding is NaN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    write_model(folder, "MixtralForCausalLM", **SHAPE, **experts)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD_TOKEN] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[GroupExecutor]:
    executor = load_group(folder, "cpu", MeshShape(2, 1), experts="ep", **OPTIONS)
    yield executor
    asyncio.run(executor.close())


@pytest.mark.long
async def test_steps_have_the_same_results_as_in_one_process(
    folder: Path, group: GroupExecutor
) -> None:
    assert BAD_TOKEN not in PROMPT
    single = load_executor(folder, **OPTIONS)
    expected, counts = await _counted(single)
    assert await _counted(group) == (expected, counts)
    layers = [sum(each) for each in counts]
    assert len(layers) == SHAPE["num_hidden_layers"]
    assert len(set(layers)) == 1
    assert layers[0] >= 2 * len(PROMPT)  # two experts a token


async def _counted(executor: Executor) -> tuple[object, list[list[int]]]:
    """The progress, and the tokens of each layer's experts in it."""
    before = await executor.expert_counts()
    progress = await progress_of(executor)
    after = await executor.expert_counts()
    assert before is not None
    assert after is not None
    return progress, (after - before).tolist()


async def test_router_without_numbers_fails_its_step_alone(group: GroupExecutor) -> None:
    engine = Engine(
        num_blocks=group.num_blocks,
        block_size=16,
        max_context_tokens=group.max_context_tokens,
        max_batch_tokens=64,
        max_sequences=16,
    )
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(seed=1, max_tokens=2, temperature=temperature)
        engine.add(new_sequence([4, BAD_TOKEN, 6], sampling))
        rows, _ = engine.schedule()
        with pytest.raises(StepFailed):
            await group.result(group.submit(rows))
        engine.fail(rows, StepFailed("its router's logits are NaN"))
    await group.check()
    assert not group.has_ended
