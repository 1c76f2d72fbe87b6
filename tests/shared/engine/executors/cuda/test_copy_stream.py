"""Copies of KV wait for the work that was delivered, and for no other; with a fake device."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from shared.engine.executors.cuda.copy_stream import CopyStream
from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.engine.step import KvRun
from tests.shared.engine.executors.cuda.fake_device import INDEX, FakeDriver
from tests.shared.engine.executors.cuda.test_cuda_executor import PROMPT, load
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.steps import Blocks, step_of

DEADLINE_S = 20.0


def failing() -> None:
    raise ValueError("a failed step")


def test_mark_is_delivered_after_its_function() -> None:
    driver = FakeDriver()
    stream = CopyStream(CudaDevice(INDEX, torch.device("cpu"), driver))
    (before,) = driver.marks  # what was launched before, as the zeros of a cache
    assert stream.delivered.event is before
    result, first = stream.launch(len, "abc")
    assert result == 3
    assert stream.delivered.event is before
    _, second = stream.launch(len, "ab")
    stream.deliver(first)  # the second is in flight
    assert stream.delivered.event is driver.marks[1]
    with pytest.raises(ValueError, match="a failed step"):
        stream.launch(failing)
    stream.deliver()
    assert stream.delivered.event is driver.marks[3]
    stream.deliver(second)  # what was delivered stays so
    assert stream.delivered.event is driver.marks[3]


def test_copy_waits_for_its_mark_and_has_ended_when_it_returns() -> None:
    driver = FakeDriver()
    stream = CopyStream(CudaDevice(INDEX, torch.device("cpu"), driver))
    mark = stream.delivered
    assert [each < 0 for each in driver.priorities] == [True]
    stream.copy(mark, driver.copies.append, "copy")
    assert driver.copies == ["begin", mark.event, "copy", "synchronize", "end"]
    driver.copies.clear()
    with pytest.raises(ValueError, match="a failed step"):
        stream.copy(mark, failing)
    assert driver.copies == ["begin", mark.event, "synchronize", "end"]


async def test_copies_beside_a_step_wait_for_the_step_before(tmp_path: Path) -> None:
    write_llama(tmp_path)
    driver = FakeDriver()
    executor = load(tmp_path, driver)
    line = Blocks(executor.num_blocks).line(PROMPT)
    step, run = step_of([(line, len(PROMPT))]), KvRun(line.block_table, 0, 16)
    wire = memoryview(bytearray(16 * executor.kv_layout.bytes_per_token))
    launched, may_end = threading.Event(), threading.Event()
    compute = executor.computer.launch

    def computed_slowly(inputs: object) -> object:
        try:
            return compute(inputs)  # type: ignore[arg-type]
        finally:
            launched.set()
            may_end.wait(DEADLINE_S)

    await executor.run(step)
    delivered = driver.marks[-1]
    executor.computer.launch = computed_slowly  # type: ignore[method-assign, assignment]
    second = asyncio.ensure_future(executor.run(step))
    assert await asyncio.to_thread(launched.wait, DEADLINE_S)
    await executor.read_kv(run, wire)
    await executor.write_kv(run, wire)
    may_end.set()
    await second
    assert [each for each in driver.copies if each in driver.marks] == [delivered] * 2
    launches = (
        lambda: executor.zero_blocks([0]),
        lambda: executor.resize_kv(executor.num_blocks),
        lambda: asyncio.to_thread(executor.step_logits, step),
    )
    for launch in launches:
        await launch()
        driver.copies.clear()
        await executor.write_kv(run, wire)
        assert driver.copies[1] is driver.marks[-1]
        assert driver.marks[-1] is not delivered
        delivered = driver.marks[-1]
    await executor.close()
