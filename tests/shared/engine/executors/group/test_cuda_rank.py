"""A rank process for one GPU computes as one process does, and its leader outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.clock import MonotonicClock
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors.group.group_executor import GroupExecutor
from shared.engine.executors.group.load_cuda_rank import load_cuda_rank
from shared.engine.executors.group.load_group import load_group
from shared.engine.loop import EngineLoop
from shared.engine.parallel.mesh_shape import MeshShape
from shared.errors import (
    CheckpointError,
    ConfigError,
    HearthError,
    NoCapacity,
    OutOfMemory,
    StepFailed,
)
from shared.messages import SamplingParams
from tests.shared.engine.executors.cuda.fake_device import Replays, load
from tests.shared.engine.executors.cuda.test_steps_ahead import (
    REQUESTS,
    SLOW,
    Ahead,
    Request,
    check_schedule,
    executors,
)
from tests.shared.engine.executors.group import test_group_handoff as handoffs
from tests.shared.engine.executors.group.fake_cuda_rank import (
    FAILING_TOKEN,
    HANGING_TOKEN,
    LARGE_TOKEN,
    MOST_BLOCKS,
    PARKED_BYTES,
    STICKY_TOKEN,
)
from tests.shared.engine.executors.test_step_profile import steps_of
from tests.support.engine.model_worker import Worker
from tests.support.engine.rig import new_sequence
from tests.support.engine.steps import Blocks
from tests.support.waiting import until

on_one_loop = pytest.mark.asyncio(loop_scope="module")

__all__ = ["executors"]  # a fixture

FAKES = "tests.shared.engine.executors.group.fake_cuda_rank"
LATE, FAILING = "late_rank", "failing_rank"
PROMPT = [(7 * n) % 190 + 3 for n in range(60)]
LEFT_WITHIN_S = 1.0
FROZEN_S = 1.5  # until a rank that is stopped counts as lost
BUDGET_S = 10.0  # more than that of a small step


@dataclass
class Ranks:
    """Starts each kind of rank once. The last test of one takes it."""

    executors: Ahead
    started: dict[str, GroupExecutor] = field(default_factory=dict)
    phases: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.executors.folder

    def of(self, fake: str) -> GroupExecutor:
        if fake not in self.started:
            entry = f"{FAKES}:{fake}"
            self.started[fake] = load_cuda_rank(
                self.folder, "cuda", entry=entry, num_threads=1, on_phase=self.phases.append
            )
        return self.started[fake]

    def take(self, fake: str) -> GroupExecutor:
        return self.started.pop(fake, None) or Ranks(self.executors).of(fake)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(executors: Ahead) -> AsyncIterator[Ranks]:
    found = Ranks(executors)
    yield found
    for each in found.started.values():
        await each.close()


SCHEDULES = given(
    requests=st.lists(REQUESTS, min_size=1, max_size=5), budget=st.sampled_from([5, 64])
)


@settings(max_examples=6, **SLOW)  # type: ignore[arg-type]
@SCHEDULES
def test_tokens_are_those_of_one_process(
    ranks: Ranks, requests: list[Request], budget: int
) -> None:
    asyncio.run(check_schedule(ranks.executors, ranks.of(LATE), requests, budget))


@pytest.mark.long
@settings(max_examples=500, **SLOW)  # type: ignore[arg-type]
@SCHEDULES
def test_tokens_are_those_of_one_process_in_many_schedules(
    ranks: Ranks, requests: list[Request], budget: int
) -> None:
    asyncio.run(check_schedule(ranks.executors, ranks.of(LATE), requests, budget))


async def tokens_of(folder: Path, executor: object, num_tokens: int) -> list[int]:
    worker = Worker(folder, "float32", executor=cast(Any, executor))
    return await worker.run(new_sequence(PROMPT, sampling(num_tokens)))


def sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=num_tokens, temperature=0.9)


@on_one_loop
async def test_rank_launches_a_step_while_the_one_before_is_computed(ranks: Ranks) -> None:
    failing = ranks.of(FAILING)
    assert (failing.depth, failing.num_stages, failing.step_launch) == (2, 1, "graphs")
    assert ranks.phases[-1] == "compiling"
    await tokens_of(ranks.folder, ranks.of(FAILING), 9)
    counts = await failing.expert_counts()
    assert counts is not None
    assert counts.sum() >= 6


@on_one_loop
async def test_kv_is_handed_off_in_both_directions(ranks: Ranks) -> None:
    rank = await handoffs.Worker.of_group(ranks.of(LATE))
    single = await handoffs.Worker.of_process(load(ranks.folder, Replays()))
    line = Blocks(single.executor.num_blocks).line(PROMPT)
    await single.compute(line, handoffs.NUM_TOKENS)
    expected = [await single.compute(line, num_new) for num_new in (1, 8)]
    for source, target in ((single, rank), (rank, single)):
        handoff = handoffs.Handoff(source, target, PROMPT)
        assert await handoff.run() == handoffs.expected_bytes(target)
        found = [await target.compute(handoff.reserved, num_new) for num_new in (1, 8)]
        assert found == expected
    await rank.push.close()
    await rank.receive.close()
    await single.close()


@on_one_loop
async def test_steps_of_the_rank_are_recorded(ranks: Ranks) -> None:
    rank = ranks.of(LATE)
    recording = asyncio.ensure_future(rank.profile(3, 60.0))
    await asyncio.sleep(0)
    wanted = await tokens_of(ranks.folder, ranks.executors.plain, 9)
    assert await tokens_of(ranks.folder, rank, 9) == wanted
    recorded = await recording
    assert (recorded.num_steps, len(steps_of(recorded))) == (3, 3)


@on_one_loop
async def test_step_that_raises_fails_alone(ranks: Ranks) -> None:
    failing = ranks.of(FAILING)
    raised: list[tuple[int, type[HearthError], str]] = [
        (FAILING_TOKEN, StepFailed, "illegal memory access"),
        (LARGE_TOKEN, OutOfMemory, r"^CUDA out of memory. Tried to allocate 2.00 GiB.$"),
    ]
    for token_id, error, message in raised:
        worker = Worker(ranks.folder, "float32", executor=cast(Any, failing))
        worker.engine.add(new_sequence([5, token_id], sampling(2)))
        rows, _ = worker.engine.schedule()
        with pytest.raises(error, match=message):
            await failing.result(failing.submit(rows))
    await failing.check()
    wanted = await tokens_of(ranks.folder, ranks.executors.plain, 9)
    assert await tokens_of(ranks.folder, ranks.of(FAILING), 9) == wanted


@on_one_loop
async def test_parked_rank_takes_another_size_that_fits(ranks: Ranks) -> None:
    failing = ranks.of(FAILING)
    assert not failing.is_elastic
    await failing.zero_blocks([0, 1])
    await failing.give_back([0, 1])
    await failing.resize_kv(0)
    assert failing.offloaded_bytes == PARKED_BYTES
    with pytest.raises(NoCapacity, match="do not fit"):
        await failing.resize_kv(MOST_BLOCKS + 1)
    await failing.resize_kv(failing.num_blocks)
    assert failing.offloaded_bytes == 0
    wanted = await tokens_of(ranks.folder, ranks.executors.plain, 9)
    assert await tokens_of(ranks.folder, ranks.of(FAILING), 9) == wanted


@on_one_loop
async def test_answer_that_nobody_awaits_is_dropped(ranks: Ranks) -> None:
    """As of counts of experts when a worker stops."""
    rank, unhandled = ranks.of(FAILING), list[dict[str, Any]]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    counting = asyncio.create_task(rank.expert_counts())
    await asyncio.sleep(0)
    counting.cancel()
    await rank.check()
    loop.set_exception_handler(None)
    assert counting.cancelled()
    assert unhandled == []


Fault = Callable[[GroupExecutor, EngineLoop], None]


def kill(rank: GroupExecutor, loop: EngineLoop) -> None:
    os.kill(rank.pids[0], signal.SIGKILL)


def freeze(rank: GroupExecutor, loop: EngineLoop) -> None:
    os.kill(rank.pids[0], signal.SIGSTOP)


def break_device(rank: GroupExecutor, loop: EngineLoop, token_id: int = STICKY_TOKEN) -> None:
    loop.engine.add(new_sequence([5, token_id], sampling(2)))
    loop.wake()


def hang_in_driver(rank: GroupExecutor, loop: EngineLoop) -> None:
    break_device(rank, loop, HANGING_TOKEN)


@on_one_loop
@pytest.mark.parametrize(
    ("fake", "fault", "limit_s"),
    [
        pytest.param(LATE, kill, LEFT_WITHIN_S, id="killed"),
        pytest.param(FAILING, break_device, LEFT_WITHIN_S, id="sticky error"),
        pytest.param(LATE, freeze, FROZEN_S + LEFT_WITHIN_S, id="frozen", marks=pytest.mark.long),
        pytest.param(
            FAILING, hang_in_driver, BUDGET_S + LEFT_WITHIN_S, id="hung", marks=pytest.mark.long
        ),
    ],
)
async def test_rank_that_is_lost_is_a_lost_device(
    ranks: Ranks, fake: str, fault: Fault, limit_s: float
) -> None:
    """It is reported within the limit; tokens until then are those of one process. This is the last
    test of a rank.
    """
    rank, streams = ranks.take(fake), [new_sequence(PROMPT[:n], sampling(1500)) for n in (20, 21)]
    loop = EngineLoop(new_engine(rank), rank, MonotonicClock())
    tokens, lost = defaultdict[bytes, list[int]](list), list[float]()

    def note(progress: list[StepProgress]) -> None:
        for each in progress:
            tokens[each.sequence.sequence_id] += each.token_ids

    loop.listen(note)
    loop.on_device_lost(lambda: lost.append(time.monotonic()))
    loop.start()
    for each in streams:
        loop.engine.add(each)
    loop.wake()
    await until(lambda: all(len(tokens[each.sequence_id]) > 20 for each in streams))
    began_at = time.monotonic()
    fault(rank, loop)
    await until(lambda: bool(lost))
    assert lost[0] - began_at < limit_s
    await loop.stop()
    for each in streams:
        found, plain = tokens[each.sequence_id], cast(Any, ranks.executors.plain)
        again = new_sequence(each.token_ids[: each.num_prompt_tokens], sampling(len(found)))
        assert found == await Worker(ranks.folder, "float32", executor=plain).run(again)


def new_engine(rank: GroupExecutor) -> Engine:
    return Engine(
        num_blocks=rank.num_blocks,
        block_size=rank.kv_layout.block_size,
        max_context_tokens=rank.max_context_tokens,
        max_batch_tokens=64,
        max_sequences=16,
    )


def test_several_ranks_on_cuda_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 ranks on cuda: several ranks compute on the CPU"):
        load_group(tmp_path, "cuda", MeshShape(2, 1))


@pytest.mark.long
def test_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 0 failed: ConfigError: device 'cuda:9'"):
        load_group(tmp_path, "cuda:9", MeshShape(1, 1))
