from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from array import array
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open

from shared.clock import MonotonicClock
from shared.engine.engine import Engine
from shared.engine.executors.load import load_executor, resolve_device
from shared.engine.loop import EngineLoop
from shared.engine.step import KvRun
from shared.errors import CheckpointError, ConfigError
from shared.messages import SamplingParams
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.rig import new_sequence, row_of
from tests.support.engine.steps import Blocks, Line, advance, greedy, prefill, step_of
from tests.support.waiting import LIMIT_S

PROMPT = torch.randint(3, 199, (83,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float32", pytest.param("float16", marks=pytest.mark.long)]
)
async def test_kv_moved_to_another_executor_gives_the_same_next_token(
    model_dir: Path, dtype: str
) -> None:
    source = load_executor(model_dir, dtype=dtype, kv_cache_bytes=1 << 20)
    target = load_executor(model_dir, dtype=dtype, kv_cache_bytes=2 << 20)
    source_line = Blocks(source.num_blocks).line(PROMPT)
    target_line = Blocks(target.num_blocks, seed=1).line(PROMPT)
    expected = prefill(source, source_line, 32)[-1]
    for first, num_tokens in ((0, 5), (5, 27), (32, 0), (32, 16), (48, 34)):
        wire = bytearray(num_tokens * source.kv_layout.bytes_per_token)
        await source.read_kv(KvRun(source_line.block_table, first, num_tokens), memoryview(wire))
        payload = memoryview(bytes(wire))  # read-only, as from a shared mapping
        await target.write_kv(KvRun(target_line.block_table, first, num_tokens), payload)
    target_line.num_computed = len(PROMPT) - 1
    assert torch.equal(advance(target, [(target_line, 1)])[-1], expected)
    await asyncio.gather(source.close(), target.close())


async def test_write_kv_changes_only_its_tokens(model_dir: Path) -> None:
    executor = load_executor(model_dir, kv_cache_bytes=1 << 20)
    line = Blocks(executor.num_blocks).line(PROMPT)
    prefill(executor, line, 32)
    token_bytes = executor.kv_layout.bytes_per_token
    before = bytearray(80 * token_bytes)
    await executor.read_kv(KvRun(line.block_table, 0, 80), memoryview(before))
    payload = np.random.default_rng(0).bytes(21 * token_bytes)
    await executor.write_kv(KvRun(line.block_table, 13, 21), memoryview(payload))
    after = bytearray(80 * token_bytes)
    await executor.read_kv(KvRun(line.block_table, 0, 80), memoryview(after))
    await executor.close()

    def by_token(wire: bytes) -> np.ndarray:
        kv_layout = executor.kv_layout
        planes = kv_layout.num_layers * 2
        return np.frombuffer(wire, np.uint8).reshape(planes, -1, token_bytes // planes)

    assert (by_token(after)[:, 13:34] == by_token(payload)).all()
    assert (by_token(after)[:, :13] == by_token(before)[:, :13]).all()
    assert (by_token(after)[:, 34:] == by_token(before)[:, 34:]).all()


async def test_small_copies_do_not_wait_for_large_ones(model_dir: Path) -> None:
    """The copy thread has one copy at a time, which is in the hands of another push."""
    executor = load_executor(model_dir, kv_cache_bytes=2 << 20)
    blocks = list(range(64))
    num_large = 64 * executor.kv_layout.block_size
    large = memoryview(bytearray(num_large * executor.kv_layout.bytes_per_token))
    may_end = threading.Event()
    executor._copy_thread.submit(may_end.wait, 2 * LIMIT_S)
    waiting = asyncio.create_task(executor.read_kv(KvRun(blocks, 0, num_large), large))
    async with asyncio.timeout(LIMIT_S):
        small = memoryview(bytearray(16 * executor.kv_layout.bytes_per_token))
        await executor.write_kv(KvRun(blocks, 0, 16), small)
        await executor.read_kv(KvRun(blocks, 0, 16), small)
    assert not waiting.done()
    may_end.set()
    await waiting
    await executor.close()


async def test_kv_of_wrong_length_or_range_is_rejected(model_dir: Path) -> None:
    executor = load_executor(model_dir, kv_cache_bytes=1 << 20)
    with pytest.raises(ValueError, match="bytes are not 2 tokens"):
        await executor.read_kv(KvRun([0], 0, 2), memoryview(bytearray(3)))
    with pytest.raises(ValueError, match="lie outside"):
        await executor.write_kv(
            KvRun([0], 15, 2), memoryview(bytes(2 * executor.kv_layout.bytes_per_token))
        )
    await executor.close()


async def test_run_samples_the_argmax_and_adapts_its_budget(model_dir: Path) -> None:
    executor = load_executor(model_dir, kv_cache_bytes=1 << 20, num_threads=1)
    line = Blocks(executor.num_blocks).line(PROMPT)
    sequence = new_sequence(PROMPT, SamplingParams(seed=0, max_tokens=1, temperature=0.0))
    sequence.block_tables = [array("q", line.block_table)]

    async def submitted(num_tokens: int) -> tuple[list[int], float]:
        step = executor.submit([row_of(sequence, num_tokens)])
        return (await executor.result(step)).token_ids, executor.step_budget_s

    _, before = await submitted(len(PROMPT))
    for _ in range(50):
        sampled, of_prompt = await submitted(len(PROMPT))
    logits = executor.step_logits(step_of([(line, len(PROMPT))]))
    assert sampled == [logits[-1].argmax().item()]
    _, of_token = await submitted(1)
    assert 1.0 < of_token < of_prompt < before
    with pytest.raises(ValueError, match="not in flight"):
        await executor.result(51)
    await executor.close()


async def test_step_without_sampling_rows_returns_no_tokens(model_dir: Path) -> None:
    executor = load_executor(model_dir, kv_cache_bytes=1 << 20)
    line = Blocks(executor.num_blocks).line(PROMPT)
    output = await executor.run(msgspec.structs.replace(step_of([(line, 20)]), sampling=greedy([])))
    assert output.token_ids == []
    await executor.close()


async def test_banned_tokens_are_not_sampled(model_dir: Path) -> None:
    executor = load_executor(model_dir, kv_cache_bytes=1 << 20)
    line = Blocks(executor.num_blocks).line(PROMPT)
    inputs = msgspec.structs.replace(step_of([(line, len(PROMPT))]), sampling=greedy([10, 82]))
    first, second = (await executor.run(inputs)).token_ids
    banned = msgspec.structs.replace(inputs.sampling, banned=[(1, second)])
    sampled = (await executor.run(msgspec.structs.replace(inputs, sampling=banned))).token_ids
    assert sampled[0] == first
    assert sampled[1] != second
    await executor.close()


def test_slot_minus_one_is_not_written(model_dir: Path) -> None:
    """A token whose KV is already stored may be computed again without a write."""
    executor = load_executor(model_dir, kv_cache_bytes=1 << 20)
    line = Blocks(executor.num_blocks).line(PROMPT)
    expected_logits = prefill(executor, line, 83)
    again = step_of([(Line(PROMPT, line.block_table), 83)])
    again.input_ids[40] = 5
    again.slot_mapping[:] = -1
    logits = executor.step_logits(again)
    assert torch.equal(logits[39], expected_logits[39])
    assert not torch.equal(logits[40], expected_logits[40])
    assert torch.equal(logits[41], expected_logits[41])  # attention read the KV of the old token


def test_executor_reports_its_properties(model_dir: Path) -> None:
    executor = load_executor(model_dir, dtype="float32", kv_cache_bytes=1 << 20)
    assert executor.kv_layout.key == "float32/b16/l2/h2/d12"
    assert executor.num_blocks == (1 << 20) // (16 * 2 * 2 * 2 * 12 * 4)
    assert executor.max_context_tokens == min(2048, executor.num_blocks * 16)
    assert executor.eos_token_ids == (2,)
    assert executor.vocab_size == 199


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is none of"),
        ({"block_size": 0}, "block_size 0 must be positive"),
        ({"kv_cache_bytes": 100}, "holds no block"),
        ({"device": "cuda:99"}, "device .cuda:99. cannot be used"),
        ({"device": "abacus"}, "device .abacus. cannot be used"),
        ({"device": "meta"}, "device .meta. cannot be used: it is neither the CPU nor CUDA"),
    ],
)
def test_bad_options_raise_config_error(
    model_dir: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_executor(model_dir, **options)  # type: ignore[arg-type]


def test_missing_folder_raises_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist: expected a checkpoint"):
        load_executor(tmp_path / "nowhere")


def test_auto_device_is_cuda_if_available() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.long
def test_cuda_executor_imports_no_cpu_modules() -> None:
    code = (
        "import sys, shared.engine.executors.load, shared.engine.executors.cuda.cuda_executor\n"
        "rooms = ('cpu_executor', 'step_threads')\n"
        "print([name for name in sys.modules if name.endswith(rooms)])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"


async def test_a_worker_counts_the_work_of_a_prompt_and_its_answer(model_dir: Path) -> None:
    """83 tokens in chunks of 32, the last of which samples, then four more steps."""
    executor = load_executor(model_dir, dtype="bfloat16", kv_cache_bytes=1 << 20)
    engine = Engine(
        num_blocks=executor.num_blocks,
        block_size=executor.kv_layout.block_size,
        max_context_tokens=executor.max_context_tokens,
        max_batch_tokens=32,
        max_sequences=1,
    )
    loop, answered = EngineLoop(engine, executor, MonotonicClock()), asyncio.Event()
    loop.listen(lambda progress: answered.set() if progress[-1].finish_reason else None)
    loop.start()
    assert (loop.load().traffic_bytes, loop.load().num_operations) == (0, 0)
    engine.add(new_sequence(PROMPT, SamplingParams(seed=0, max_tokens=5, temperature=0.0)))
    loop.wake()
    await answered.wait()
    load = loop.load()
    await loop.stop()
    sizes = sizes_of(model_dir)
    head = sizes.pop("lm_head.weight") + sizes.pop("model.norm.weight")
    layers = sum(sizes.values()) - sizes["model.embed_tokens.weight"]
    ends = [32, 64, 83, 84, 85, 86, 87]  # of each step: it sees the keys up to there
    config = executor.computer.model.config
    token_bytes = executor.kv_layout.bytes_per_token
    assert load.num_busy_steps == len(ends)
    assert load.traffic_bytes == 2 * (7 * layers + 5 * head) + token_bytes * (sum(ends) + 87)
    pair = 4 * config.num_layers * config.num_heads * config.head_dim
    assert load.num_operations == 2 * (87 * layers + 5 * head) + pair * 87 * 88 // 2


def sizes_of(model_dir: Path) -> dict[str, int]:
    """Returns the number of elements of each tensor in the checkpoint's file."""
    with safe_open(model_dir / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
