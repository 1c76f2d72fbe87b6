"""Recordings of steps: as many as asked for, and nothing of their contents."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.engine.executors.executor import PROFILE_S, RecordedSteps
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.warm_up import idle_step
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.executors.timing_executor import TimingExecutor
from shared.errors import InvalidRequest
from tests.support.engine.checkpoints import write_llama
from tests.support.world.clock import VirtualClock

NUMBERS = {"External id", "Record function id", "Ev Idx"}  # of events, by the profiler
NAMES = {"name", "labels", "sort_index", "Op count"}  # of processes and threads


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@pytest.fixture
async def executor(model_dir: Path) -> AsyncIterator[LocalExecutor]:
    executor = load_executor(model_dir, kv_cache_bytes=1 << 20, num_threads=1)
    yield executor
    await executor.close()


def events_of(recorded: RecordedSteps) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(recorded.trace))["traceEvents"]
    return events


def steps_of(recorded: RecordedSteps) -> list[str]:
    return [each["name"] for each in events_of(recorded) if each["name"].startswith("step: ")]


async def test_next_steps_are_recorded_without_arguments(executor: LocalExecutor) -> None:
    step = idle_step(16, [1, 5])
    before = await executor.run(step)
    recording = asyncio.ensure_future(executor.profile(2, 20.0))
    await asyncio.sleep(0)
    assert executor.step_extension_s == PROFILE_S
    outputs = [await executor.run(step) for _ in range(4)]  # queued after the start
    recorded = await recording
    assert recorded.num_steps == 2
    assert steps_of(recorded) == ["step: 2 rows, 6 tokens, 6 of context"] * 2
    assert any(each["name"].startswith("aten::") for each in events_of(recorded))
    assert {key for each in events_of(recorded) for key in each.get("args", {})} <= NUMBERS | NAMES
    assert executor.step_extension_s == 0
    assert [each.token_ids for each in outputs] == [before.token_ids] * 4


async def test_fewer_steps_than_wanted_are_recorded_after_the_time(executor: LocalExecutor) -> None:
    recording = asyncio.ensure_future(executor.profile(5, 0.2))
    await asyncio.sleep(0)
    await executor.run(idle_step(16, [3]))
    recorded = await recording
    assert (recorded.num_steps, len(steps_of(recorded))) == (1, 1)
    assert (await executor.profile(5, 0.05)).num_steps == 0


async def test_step_that_raises_is_recorded_and_ends_nothing(
    executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = asyncio.ensure_future(executor.profile(2, 20.0))
    await asyncio.sleep(0)
    with monkeypatch.context() as patched, pytest.raises(FloatingPointError):
        patched.setattr(executor.computer, "run", _raise)
        await executor.run(idle_step(16, [3]))
    await executor.run(idle_step(16, [3]))
    assert (await recording).num_steps == 2


def _raise(inputs: object) -> None:
    raise FloatingPointError("a router's logits are NaN or infinite")


async def test_worker_without_torch_refuses() -> None:
    with pytest.raises(InvalidRequest, match="not computed by torch"):
        await TimingExecutor(VirtualClock(), num_blocks=4).profile(1, 1.0)
