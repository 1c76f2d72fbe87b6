"""Decode steps by graphs, on CPU tensors: a replay computes the step again from the same inputs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from structlog.testing import capture_logs

from shared.engine.executors.cuda import decode_graphs
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.executors.cuda.cuda_load import has_graphs
from shared.engine.executors.cuda.decode_graphs import (
    GRAPH_BYTES,
    MAX_TOKENS,
    DecodeGraphs,
    beside_graphs,
    max_graphs_in,
    row_counts,
    table_widths,
)
from shared.engine.executors.cuda.idle_captures import IdleCaptures
from shared.engine.executors.loading.kv_sizing import MemoryReport
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.warm_up import idle_step
from shared.engine.models.checkpoint_config import read_config
from shared.messages import SamplingParams, TokenLogprobs
from tests.shared.engine.executors.cuda.fake_device import INDEX, FakeDriver, Replays, load
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.families import FAMILIES
from tests.support.engine.model_worker import Worker
from tests.support.engine.rig import new_sequence
from tests.support.grids import in_short_run

PROMPTS = [[(11 * n + k) % 190 + 3 for n in range(20 + 9 * k)] for k in range(5)]
SAMPLINGS = {
    "greedy": [SamplingParams(seed=3, max_tokens=9, temperature=0.0)],
    "drawn": [
        SamplingParams(seed=3, max_tokens=9, temperature=0.9, top_k=40, top_p=0.95),
        SamplingParams(seed=4, max_tokens=12, temperature=0.0),
    ],
    "on the host": [
        SamplingParams(seed=5, max_tokens=9, temperature=0.8, frequency_penalty=1.0),
        SamplingParams(seed=6, max_tokens=9, temperature=0.0, num_logprobs=2),
    ],
}


def graphs_of(executor: CudaExecutor) -> DecodeGraphs:
    assert executor.computer.graphs is not None
    return executor.computer.graphs


Generated = list[tuple[list[int], list[TokenLogprobs]]]


def generated(folder: Path, executor: CudaExecutor, samplings: list[SamplingParams]) -> Generated:
    """Runs the prompts with the samplings in turn. Returns the tokens and logprobs of each."""
    worker = Worker(folder, "float32", executor=executor)
    sequences = [
        new_sequence(prompt, samplings[n % len(samplings)]) for n, prompt in enumerate(PROMPTS)
    ]
    asyncio.run(worker.run(*sequences))
    ids = [each.sequence_id for each in sequences]
    return [(worker.tokens[each], worker.logprobs[each]) for each in ids]


def test_graphs_are_of_models_that_sample(tmp_path: Path) -> None:
    write_llama(tmp_path)
    config, cuda = read_config(tmp_path), torch.device("cuda")
    assert has_graphs(config, LoadOptions(), cuda)
    assert not has_graphs(replace(config, has_head=False), LoadOptions(), cuda)
    assert not has_graphs(config, LoadOptions(executor="plain"), cuda)
    assert not has_graphs(config, LoadOptions(), torch.device("cpu"))


# Grouped queries, windows, chunks with temperatures, latents; with experts rows are not padded.
@pytest.mark.parametrize(
    "family",
    in_short_run(["gemma3", "llama4, experts"], ["qwen2", "gemma3", "llama4, experts", "deepseek"]),
)
def test_tokens_are_those_of_eager_steps(family: str, tmp_path: Path) -> None:
    FAMILIES[family].write(tmp_path)
    plain, graphed = load(tmp_path), load(tmp_path, Replays())
    for samplings in SAMPLINGS.values():
        wanted = generated(tmp_path, plain, samplings)
        assert generated(tmp_path, graphed, samplings) == wanted
    graphs = graphs_of(graphed)
    assert graphs.num_replayed > graphs.num_eager > 0
    assert plain.computer.graphs is None
    assert (plain.step_launch, graphed.step_launch) == ("plain", "graphs")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_llama(tmp_path)
    return tmp_path


def test_smallest_shapes_are_captured_first_after_the_largest(llama: Path) -> None:
    """Which takes the memory that all others use again."""
    device = Replays()
    executor = load(llama, device)
    assert device.rows == [16, 16, 8, 8, 4, 4, 2, 2, 1, 1]  # drawn and greedy
    generated(llama, executor, SAMPLINGS["greedy"])
    assert (device.num_captured, graphs_of(executor).num_eager) == (10, 0)


def test_other_shapes_are_captured_at_their_second_step(llama: Path) -> None:
    device = Replays()
    executor = load(llama, device)
    for _ in range(2):  # every shape comes twice
        generated(llama, executor, SAMPLINGS["on the host"])
    assert 0 < device.num_captured - 10 == graphs_of(executor).num_eager


def test_least_recently_used_graph_gives_way(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "REPLACE_APART_S", 0.0)
    device = Replays()
    executor = load(llama, device, max_graphs=8)
    graphs = graphs_of(executor)
    assert not graphs.has_next()
    wanted = generated(llama, load(llama), SAMPLINGS["on the host"])
    for _ in range(2):
        assert generated(llama, executor, SAMPLINGS["on the host"]) == wanted
    assert device.num_captured > 10
    assert len(graphs._graphs) <= 8


def test_graphs_give_way_seldom(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that changes among more shapes than fit is computed eagerly, not captured again."""
    monkeypatch.setattr(decode_graphs, "REPLACE_APART_S", 1000.0)
    device = Replays()
    executor = load(llama, device, max_graphs=8)
    for _ in range(2):
        for samplings in SAMPLINGS.values():
            generated(llama, executor, samplings)
    assert device.num_captured == 10


def test_logits_that_graphs_return_count_as_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "REPLACE_APART_S", 0.0)
    monkeypatch.setattr(decode_graphs, "GRAPH_BYTES", 200)
    executor = load(llama, Replays())
    graphs, wanted = graphs_of(executor), generated(llama, load(llama), SAMPLINGS["on the host"])
    for _ in range(2):
        assert generated(llama, executor, SAMPLINGS["on the host"]) == wanted
    shapes = [shape for shape in graphs._graphs if not shape.is_drawn]
    logits_bytes = sum(4 * each.num_rows * executor.vocab_size for each in shapes)
    assert 0 < 200 * len(graphs._graphs) + logits_bytes <= 200 * 64


def test_memory_for_graphs_is_not_for_kv() -> None:
    report = MemoryReport(free=60 << 30, total=80 << 30)
    most = max_graphs_in(report.total)
    assert most == 91
    assert beside_graphs(report) == MemoryReport(report.free - most * GRAPH_BYTES, report.total)
    assert max_graphs_in(1 << 30) == 10


def test_another_kv_cache_gets_other_graphs(llama: Path) -> None:
    device = Replays()
    executor = load(llama, device)
    wanted = generated(llama, executor, SAMPLINGS["greedy"])
    asyncio.run(executor.resize_kv(executor.num_blocks))
    assert generated(llama, executor, SAMPLINGS["greedy"]) == wanted
    assert device.num_captured > 10


@pytest.mark.parametrize("kind", [RuntimeError, Exception])  # and a compiler's, of its own class
def test_step_that_cannot_be_captured_stays_eager(llama: Path, kind: type[Exception]) -> None:
    error = kind("operation not permitted when stream is capturing\nmore")
    with capture_logs() as logs:
        executor = load(llama, Replays(error))
        found = generated(llama, executor, SAMPLINGS["greedy"])
    assert found == generated(llama, load(llama), SAMPLINGS["greedy"])
    assert (graphs_of(executor).num_replayed, executor.step_launch) == (0, "plain")
    (reason,) = {each["reason"] for each in logs if each["event"] == "graph_not_captured"}
    assert reason == "operation not permitted when stream is capturing"


def test_steps_that_no_graph_can_do(llama: Path) -> None:
    graphs = graphs_of(load(llama, Replays()))
    assert graphs.shape_of(idle_step(16, [1, 1], temperature=0.0, num_groups=1)) is not None
    assert graphs.shape_of(idle_step(16, [2, 1], temperature=0.0, num_groups=1)) is None
    assert graphs.shape_of(idle_step(16, [1] * 17, temperature=0.0, num_groups=1)) is None


def test_row_counts() -> None:
    assert row_counts(20, is_padded=True) == (1, 2, 4, 8, 16, 20)
    assert row_counts(256, is_padded=True)[-2:] == (248, 256)
    assert row_counts(3, is_padded=True) == (1, 2, 3)
    assert row_counts(3, is_padded=False) == (1, 2, 3)


def test_table_widths() -> None:
    assert table_widths(131_072, 64) == (32, 128, 512, 2048)
    assert table_widths(3000, 16) == (128, 188)
    assert table_widths(100, 16) == (7,)
    assert MAX_TOKENS == 64 * 65_536


def test_padding_reads_and_stores_nothing(llama: Path) -> None:
    """The first graphs are captured with rows of padding alone."""
    executor = load(llama)
    before = executor.computer.kv_cache.clone()
    executor.computer.use_graphs(Replays(), max_rows=16, max_graphs=64)
    assert np.array_equal(executor.computer.kv_cache.numpy(), before.numpy())


async def test_experts_do_not_count_what_captures_compute(tmp_path: Path) -> None:
    FAMILIES["llama4, experts"].write(tmp_path)
    executor = load(tmp_path, Replays())
    before = await executor.expert_counts()
    executor.computer.capture_next()
    assert before is not None
    assert np.array_equal(await executor.expert_counts(), before)
    await executor.close()


async def test_steps_are_computed_while_experts_are_counted(tmp_path: Path) -> None:
    """No thread waits for the device, which is late. This one, which polls, is bound to it."""
    FAMILIES["llama4, experts"].write(tmp_path)
    driver = FakeDriver()
    executor = await asyncio.to_thread(load, tmp_path, Replays(), driver=driver)
    before = await executor.expert_counts()
    driver.is_late = True
    counting = asyncio.ensure_future(executor.expert_counts())
    await asyncio.sleep(0)  # it is asked for before the step
    await executor.check()
    assert not counting.done()
    assert driver.current_device() == INDEX
    driver.is_late = False
    counts, after = await counting, await executor.expert_counts()
    assert before is not None and counts is not None and after is not None
    assert np.array_equal(counts, before)
    assert after.sum() > counts.sum()
    await executor.close()


async def test_other_shapes_are_captured_while_no_step_runs(llama: Path) -> None:
    device = Replays()
    executor = load(llama)
    executor.computer.use_graphs(device, max_rows=32, max_graphs=64)
    captures = executor._captures
    captures._idle_s = 0.01
    captures.begin_step()
    captures.end_step()
    await captures._background.idle()
    assert device.rows[10:] == [16, 16, 24, 24]
    assert not executor.computer.has_graphs_left()
    captures.begin_step()
    captures.end_step()
    assert len(captures._background) == 0
    await executor.close()


async def test_nothing_is_captured_while_a_step_runs() -> None:
    left = ["a", "b"]

    async def capture() -> None:
        left.pop()

    captures = IdleCaptures(lambda: bool(left), capture, idle_s=0.01)
    captures.begin_step()
    captures.end_step()
    captures.begin_step()
    await asyncio.sleep(0.05)
    assert len(left) == 2
    captures.end_step()
    await captures._background.idle()
    assert not left


async def test_captures_that_fail_end_alone() -> None:
    async def capture() -> None:
        raise ValueError("a bug")

    captures = IdleCaptures(lambda: True, capture, idle_s=0.0)
    with capture_logs() as logs:
        captures.begin_step()
        captures.end_step()
        await captures._background.idle()
    assert "idle_captures_failed" in [each["event"] for each in logs]
    captures.begin_step()
    captures.end_step()
    assert len(captures._background) == 0
