"""Groups of real rank processes compute the bits of one process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.batching.sequence import Sequence
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors.executor import PROFILE_S, Executor
from shared.engine.executors.group.group_executor import GroupExecutor
from shared.engine.executors.group.load_group import load_group
from shared.engine.executors.group.messages import EndRows
from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.parallel.mesh_shape import MeshShape
from shared.errors import CheckpointError, ConfigError, DeviceFailed, InvalidRequest, StepFailed
from shared.messages import SamplingParams
from tests.shared.engine.executors.test_step_profile import steps_of
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.masked import SumGrammar
from tests.support.engine.rig import new_sequence, row_of
from tests.support.waiting import until

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
def single(folder: Path) -> LocalExecutor:
    return load_executor(folder, **OPTIONS)


@pytest.fixture(
    scope="module",
    params=[  # groups with experts have one stage of two ranks
        pytest.param(MeshShape(1, 2), id="pp 2"),
        pytest.param(MeshShape(2, 1), id="tp 2", marks=pytest.mark.long),
        pytest.param(MeshShape(2, 2), id="tp 2 x pp 2", marks=pytest.mark.long),
    ],
)
def group(request: pytest.FixtureRequest, folder: Path) -> Iterator[GroupExecutor]:
    executor = load_group(folder, "cpu", request.param, **OPTIONS)
    yield executor
    asyncio.run(executor.close())


def sequences() -> list[Sequence]:
    """Rows that draw greedily and with noise, under penalties, bans, bias and masks that come late,
    with logprobs, of a prompt in chunks; an embedding. Between them they use every option.
    """
    drawn = {"temperature": 0.9, "top_p": 0.95}
    options: list[dict[str, Any]] = [
        {
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.25,
            "bad_words": ((7,), (3, 9)),
            **drawn,
        },
        {"num_logprobs": 3, "num_prompt_logprobs": 2, **drawn},
        {"logit_bias": ((18, 2.0),), "num_logprobs": 2, "logprobs_mode": "processed", **drawn},
        {"temperature": 0.0, "min_tokens": 3},
        {"min_p": 0.01, "top_k": 40, **drawn},
        drawn,
    ]
    found = [
        new_sequence(PROMPT[n:], SamplingParams(seed=n, max_tokens=9, **each), stop=(5,))
        for n, each in enumerate(options)
    ]
    found[3].grammar = SumGrammar(VOCAB_SIZE, late_at=(2, 4), compiled_after=2)
    found[4].grammar = SumGrammar(VOCAB_SIZE, modulus=2)
    return [*found, *(new_sequence(PROMPT[:n], None, pooling="mean") for n in (33, 50))]


async def progress_of(executor: Executor) -> list[dict[str, Any]]:
    """What each sequence gets, in an engine whose prompts are computed in chunks."""
    engine = Engine(
        num_blocks=executor.num_blocks,
        block_size=16,
        max_context_tokens=executor.max_context_tokens,
        max_batch_tokens=48,
        max_sequences=16,
    )
    submitted, in_flight = sequences(), deque[tuple[list[ScheduledSequence], int]]()
    for each in submitted:
        engine.add(each)
    progress: list[StepProgress] = []
    most_in_flight = 0
    while not engine.is_idle:
        rows, found = engine.schedule(num_stages=executor.num_stages)
        progress += found
        if rows:
            in_flight.append((rows, executor.submit(rows)))
        most_in_flight = max(most_in_flight, len(in_flight))
        if in_flight and (not rows or len(in_flight) == executor.depth):
            rows, step = in_flight.popleft()
            progress += engine.apply(rows, await executor.result(step))
    assert most_in_flight == executor.depth
    return [joined([p for p in progress if p.sequence is each]) for each in submitted]


def joined(progress: list[StepProgress]) -> dict[str, Any]:
    *_, last = progress
    return {
        "tokens": [token_id for each in progress for token_id in each.token_ids],
        "logprobs": [each.logprobs for each in progress if each.logprobs],
        "prompt_logprobs": [each.prompt_logprobs for each in progress if each.prompt_logprobs],
        "finish_reason": last.finish_reason,
        "embedding": None if last.embedding is None else last.embedding.tolist(),
    }


async def test_steps_have_the_same_results_as_in_one_process(
    single: LocalExecutor, group: GroupExecutor
) -> None:
    expected = await progress_of(single)
    assert await progress_of(group) == expected
    assert {each["finish_reason"] for each in expected} <= {"length", "stop"}
    assert len(expected[1]["prompt_logprobs"][0]) == len(PROMPT) - 2


async def test_steps_of_the_rank_that_samples_are_recorded(group: GroupExecutor) -> None:
    """The group goes on when a recording fails, or when no step comes in time."""
    with pytest.raises(InvalidRequest, match="no steps are recorded"):
        await group._trace_part(0)
    assert (await group.profile(3, 0.01)).num_steps == 0
    recording = asyncio.ensure_future(group.profile(3, 60.0))
    await asyncio.sleep(0)
    assert group.step_extension_s == PROFILE_S
    await progress_of(group)
    recorded = await recording
    assert (recorded.num_steps, len(steps_of(recorded))) == (3, 3)
    assert group.step_extension_s == 0
    await group.check()


async def test_sampling_that_raises_fails_its_step_alone(group: GroupExecutor) -> None:
    """The rows of others are computed again, and the group goes on."""
    engine = Engine(
        num_blocks=group.num_blocks,
        block_size=16,
        max_context_tokens=group.max_context_tokens,
        max_batch_tokens=64,
        max_sequences=16,
    )
    sampling = SamplingParams(seed=1, max_tokens=2, temperature=1.0)
    sequence = new_sequence(PROMPT[:9], sampling)
    engine.add(sequence)
    outside = ((VOCAB_SIZE + 9, 1.0),)  # which `add` would have refused
    sequence.sampling = msgspec.structs.replace(sampling, logit_bias=outside)
    rows, _ = engine.schedule()
    with pytest.raises(StepFailed):
        await group.result(group.submit(rows))
    engine.fail(rows, StepFailed("its sampling raised"))
    await group.check()
    assert not group.has_ended


async def test_plan_of_any_size_goes_through(group: GroupExecutor) -> None:
    """A row with penalties carries the tokens of its whole sequence."""
    sampling = SamplingParams(seed=1, max_tokens=2, frequency_penalty=0.5)
    sequence = new_sequence([7] * 2_500_000, sampling)
    sequence.block_tables, sequence.first_blocks = [array("q", [0])], [0]
    await group.result(group.submit([row_of(sequence, 5)]))
    await group.check()


async def test_step_that_could_not_be_submitted_is_computed_later(
    single: LocalExecutor, group: GroupExecutor
) -> None:
    places = {
        single: "shared.engine.executors.rank_state.RankState._add",
        group: "shared.engine.executors.group.group_executor.encode",
    }
    for executor, place in places.items():
        rows = [row_of(with_blocks(PROMPT[:4]), 4)]
        with mock.patch(place, side_effect=MemoryError), pytest.raises(MemoryError):
            executor.submit(rows)
        await executor.result(executor.submit(rows))


async def test_idle_group_ends_the_rows_of_its_last_sequences(group: GroupExecutor) -> None:
    """Else ranks keep their prompts and options until somebody asks again."""
    await group.forget_ended()
    await progress_of(group)
    with mock.patch.object(group._steps, "command", wraps=group._steps.command) as command:
        for _ in range(2):
            await group.forget_ended()
    command.assert_called_once()
    sent, _ = command.call_args.args  # and its limit
    assert isinstance(sent, EndRows)
    assert sent.rows


async def test_parked_group_gives_blocks_back_and_serves_again(
    single: LocalExecutor, group: GroupExecutor
) -> None:
    assert group.max_blocks == group.num_blocks
    await group.give_back(list(range(group.num_blocks)))
    await group.resize_kv(0)
    await group.resize_kv(group.num_blocks)
    assert await progress_of(group) == await progress_of(single)


async def prefilled(executor: Executor, num_tokens: int) -> list[int]:
    """The blocks that hold the KV of a prompt."""
    engine = Engine(
        num_blocks=64,
        block_size=16,
        max_context_tokens=256,
        max_batch_tokens=64,
        max_sequences=1,
    )
    prefill = new_sequence(PROMPT[:num_tokens], None)
    engine.add(prefill)
    rows, _ = engine.schedule()
    engine.apply(rows, await executor.result(executor.submit(rows)))
    return prefill.block_tables[0].tolist()


async def test_group_describes_the_whole_model(single: LocalExecutor, group: GroupExecutor) -> None:
    for name in ("revision", "kv_layout", "numerics", "vocab_size", "max_context_tokens", "work"):
        assert getattr(group, name) == getattr(single, name)
    assert await group.expert_counts() is None  # no stage has experts
    await group.check()
    (link,) = group.links  # of two ranks of this host
    assert 0 < link.link.latency_s < 0.1


@pytest.mark.long  # test_bf16_exchange.py has ranks that are threads
async def test_sums_in_bf16_are_those_of_one_process(folder: Path) -> None:
    rounded = load_executor(folder, activations="bf16-exchange", **OPTIONS)
    group = load_group(folder, "cpu", MeshShape(2), activations="bf16-exchange", **OPTIONS)
    expected = await progress_of(rounded)
    assert await progress_of(group) == expected
    assert group.numerics == rounded.numerics
    await group.close()


async def test_killed_rank_ends_the_group(folder: Path) -> None:
    """It is noticed without waiting for a step; all steps in flight raise."""
    group = load_group(folder, "cpu", MeshShape(1, 2), **OPTIONS)
    await group.check()
    os.kill(group.pids[0], signal.SIGSTOP)
    rows = [row_of(with_blocks(PROMPT[:n]), n) for n in (4, 5)[: group.depth]]
    steps = [group.submit([each]) for each in rows]
    os.kill(group.pids[0], signal.SIGKILL)
    await until(lambda: group.has_ended)
    for step in steps:
        with pytest.raises(DeviceFailed, match="a rank of this worker is lost"):
            await group.result(step)
    with pytest.raises(DeviceFailed, match="a rank of this worker is lost"):
        await group.check()
    await group.close()


@pytest.mark.long  # parallel/processes/test_group.py freezes a rank in the short run
async def test_frozen_rank_ends_the_group_within_the_budget_of_a_step(folder: Path) -> None:
    """All steps in flight raise."""
    group = load_group(folder, "cpu", MeshShape(1, 2), **OPTIONS)
    await prefilled(group, 5)
    os.kill(group.pids[0], signal.SIGSTOP)
    began_at = time.monotonic()
    rows = [row_of(with_blocks(PROMPT[:n]), n) for n in (4, 5)]
    steps = [group.submit([each]) for each in rows]
    budget_s = group.step_budget_s
    for step in steps:
        with pytest.raises(DeviceFailed, match="a rank of this worker is lost"):
            await group.result(step)
    assert time.monotonic() - began_at < 2 * budget_s + 1
    await group.close()


def with_blocks(prompt_ids: list[int]) -> Sequence:
    sequence = new_sequence(prompt_ids, None)
    sequence.block_tables, sequence.first_blocks = [array("q", [0])], [0]
    return sequence


def test_checkpoint_that_cannot_be_cut_is_an_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="3 layers cannot form 4 stages"):
        load_group(folder, "cpu", MeshShape(1, 4), **OPTIONS)


def test_bad_checkpoint_is_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="no such file"):
        load_group(tmp_path, "cpu", MeshShape(2, 1), **OPTIONS)
