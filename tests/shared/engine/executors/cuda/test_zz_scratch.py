"""Scratch: parks, wakes, steps, copies and captures at once on a late device with answers apart."""

import asyncio, random
import pytest, torch
from pathlib import Path
from tests.support.engine.checkpoints import write_llama
from tests.shared.engine.executors.cuda import late_device
from tests.shared.engine.executors.cuda.late_device import load_late
from tests.shared.engine.executors.cuda.test_steps_ahead import *
from tests.shared.engine.executors.cuda.offload.test_weight_offload import tokens_of, check_copies
from shared.engine.executors.cuda.offload.weight_offload import WeightOffload
from shared.engine.executors.cuda.offload import weight_offload
from shared.engine.executors.cuda import cuda_load
from tests.support.engine.device_forms import use_device_forms


@pytest.mark.parametrize("seed", range(6))
async def test_rand(tmp_path, seed, monkeypatch):
    use_device_forms(monkeypatch)
    monkeypatch.setattr(cuda_load, "run_largest_step", lambda *_: None)
    write_llama(tmp_path)
    executor = load_late(tmp_path, seed, answers_apart=bool(seed % 2))
    queue = executor._device.driver._queue
    m, c = executor.computer.model, executor.computer.expert_sums()
    executor._offload = WeightOffload(m, c, executor._device, executor.page_lock.lock)
    sync = lambda: queue.wait()
    object.__setattr__(executor._device.driver, "synchronize", sync)
    executor._captures._idle_s = 0.0
    chance = random.Random(seed)
    expected = {}
    plain = load(tmp_path)
    for n in range(3):
        expected[n] = await tokens_of(plain, tmp_path, n)
    num = executor.num_blocks
    for _ in range(12):
        what = chance.choice(["park", "wake", "steps", "many", "copies", "check"])
        if what == "park":
            jobs = [executor.resize_kv(0)]
            if chance.random() < 0.5:
                jobs.insert(0, executor.check())
            if chance.random() < 0.5:
                jobs.append(executor.expert_counts())
            await asyncio.gather(*jobs)
            num = 0
        elif what == "wake":
            num = executor.num_blocks - chance.randrange(4)
            await executor.resize_kv(num)
        elif what == "check":
            await executor.check()
        elif num and what == "copies":
            n = chance.randrange(3)
            first = executor.num_blocks - 10
            got, _ = await asyncio.gather(
                tokens_of(executor, tmp_path, n), check_copies(executor, first)
            )
            assert got == expected[n]
        elif num:
            n = chance.randrange(3)
            assert await tokens_of(executor, tmp_path, n) == expected[n]
    await executor.close()
