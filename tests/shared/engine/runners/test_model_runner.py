from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from shared.engine.runner import KvRun
from shared.engine.runners.load import load_runner, resolve_device
from shared.errors import CheckpointError, ConfigError
from tests.shared.engine.support.checkpoints import write_llama
from tests.shared.engine.support.steps import Blocks, Line, advance, greedy, prefill, step_of

PROMPT = torch.randint(3, 199, (83,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
async def test_kv_moved_to_another_runner_gives_the_same_next_token(
    model_dir: Path, dtype: str
) -> None:
    source = load_runner(model_dir, dtype=dtype, kv_cache_bytes=1 << 20)
    target = load_runner(model_dir, dtype=dtype, kv_cache_bytes=2 << 20)
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
    runner = load_runner(model_dir, kv_cache_bytes=1 << 20)
    line = Blocks(runner.num_blocks).line(PROMPT)
    prefill(runner, line, 32)
    token_bytes = runner.kv_layout.bytes_per_token
    before = bytearray(80 * token_bytes)
    await runner.read_kv(KvRun(line.block_table, 0, 80), memoryview(before))
    payload = np.random.default_rng(0).bytes(21 * token_bytes)
    await runner.write_kv(KvRun(line.block_table, 13, 21), memoryview(payload))
    after = bytearray(80 * token_bytes)
    await runner.read_kv(KvRun(line.block_table, 0, 80), memoryview(after))
    await runner.close()

    def by_token(wire: bytes) -> np.ndarray:
        kv_layout = runner.kv_layout
        planes = kv_layout.num_layers * 2
        return np.frombuffer(wire, np.uint8).reshape(planes, -1, token_bytes // planes)

    assert (by_token(after)[:, 13:34] == by_token(payload)).all()
    assert (by_token(after)[:, :13] == by_token(before)[:, :13]).all()
    assert (by_token(after)[:, 34:] == by_token(before)[:, 34:]).all()


async def test_kv_of_wrong_length_or_range_is_rejected(model_dir: Path) -> None:
    runner = load_runner(model_dir, kv_cache_bytes=1 << 20)
    with pytest.raises(ValueError, match="bytes are not 2 tokens"):
        await runner.read_kv(KvRun([0], 0, 2), memoryview(bytearray(3)))
    with pytest.raises(ValueError, match="lie outside"):
        await runner.write_kv(
            KvRun([0], 15, 2), memoryview(bytes(2 * runner.kv_layout.bytes_per_token))
        )
    await runner.close()


async def test_run_samples_the_argmax_and_adapts_its_budget(model_dir: Path) -> None:
    runner = load_runner(model_dir, kv_cache_bytes=1 << 20, num_threads=1)
    line = Blocks(runner.num_blocks).line(PROMPT)
    inputs = step_of([(line, len(PROMPT))])
    before = runner.step_budget_s(inputs)
    for _ in range(50):
        sampled = (await runner.run(inputs)).token_ids
    assert sampled == runner.step_logits(inputs).argmax(-1).tolist()
    assert runner.step_budget_s(step_of([(line, 1)])) < runner.step_budget_s(inputs) < before
    assert runner.step_budget_s(step_of([(line, 1)])) > 1.0
    await runner.close()


async def test_step_without_sampling_rows_returns_no_tokens(model_dir: Path) -> None:
    runner = load_runner(model_dir, kv_cache_bytes=1 << 20)
    line = Blocks(runner.num_blocks).line(PROMPT)
    output = await runner.run(msgspec.structs.replace(step_of([(line, 20)]), sampling=greedy([])))
    assert output.token_ids == []
    await runner.close()


async def test_banned_tokens_are_not_sampled(model_dir: Path) -> None:
    runner = load_runner(model_dir, kv_cache_bytes=1 << 20)
    line = Blocks(runner.num_blocks).line(PROMPT)
    inputs = msgspec.structs.replace(step_of([(line, len(PROMPT))]), sampling=greedy([10, 82]))
    first, second = (await runner.run(inputs)).token_ids
    banned = msgspec.structs.replace(inputs.sampling, banned=[(1, second)])
    sampled = (await runner.run(msgspec.structs.replace(inputs, sampling=banned))).token_ids
    assert sampled[0] == first
    assert sampled[1] != second
    await runner.close()


def test_slot_minus_one_is_not_written(model_dir: Path) -> None:
    """A token whose KV is already stored may be computed again without a write."""
    runner = load_runner(model_dir, kv_cache_bytes=1 << 20)
    line = Blocks(runner.num_blocks).line(PROMPT)
    expected_logits = prefill(runner, line, 83)
    again = step_of([(Line(PROMPT, line.block_table), 83)])
    again.input_ids[40] = 5
    again.slot_mapping[:] = -1
    logits = runner.step_logits(again)
    assert torch.equal(logits[39], expected_logits[39])
    assert not torch.equal(logits[40], expected_logits[40])
    assert torch.equal(logits[41], expected_logits[41])  # attention read the KV of the old token


def test_runner_reports_its_properties(model_dir: Path) -> None:
    runner = load_runner(model_dir, dtype="float32", kv_cache_bytes=1 << 20)
    assert runner.kv_layout.key == "float32/b16/l2/h2/d12"
    assert runner.num_blocks == (1 << 20) // (16 * 2 * 2 * 2 * 12 * 4)
    assert runner.max_context_tokens == min(2048, runner.num_blocks * 16)
    assert runner.eos_token_ids == (2,)
    assert runner.vocab_size == 199
    assert runner.model_name == model_dir.name


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
        load_runner(model_dir, **options)  # type: ignore[arg-type]


def test_missing_folder_raises_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        load_runner(tmp_path / "nowhere")


def test_auto_device_is_cuda_if_available() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_cuda_runner_imports_no_cpu_modules() -> None:
    code = (
        "import sys, shared.engine.runners.load, shared.engine.runners.cuda_runner\n"
        "rooms = ('cpu_runner', 'step_threads')\n"
        "print([name for name in sys.modules if name.endswith(rooms)])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
