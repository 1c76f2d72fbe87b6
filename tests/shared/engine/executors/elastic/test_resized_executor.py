"""Executors whose KV cache changes its size: memory goes back, tokens stay the same.

Cases on the CPU always run; `pytest -m gpu` runs the cases on GPUs.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch

from shared.engine.engine import Engine
from shared.engine.executors.elastic_kv import ElasticKv
from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.kv.kv_cache import allocate_kv_cache, release_blocks
from shared.engine.weights.shared_weights import weights_cache_dir
from shared.errors import ConfigError, InvalidRequest
from shared.kv_layout import KvGroup, KvLayout, PagedKv
from tests.shared.engine.test_on_devices import BLOCK_BYTES, PROMPT, cuda
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.steps import Blocks, generate
from tests.support.services.parked_worker import memory_bytes

NUM_BLOCKS, MOST_BLOCKS, NUM_NEW = 16, 48, 8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, hidden_size=64, head_dim=16)
    return folder


@pytest.fixture(params=["cpu", cuda(0)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(folder: Path, device: str, **options: object) -> LocalExecutor:
    return load_executor(
        folder,
        device,
        dtype="float32",
        kv_cache_bytes=NUM_BLOCKS * BLOCK_BYTES,
        kv_ceiling_bytes=MOST_BLOCKS * BLOCK_BYTES,
        num_threads=1,
        **options,
    )


def elastic(executor: LocalExecutor, num_blocks: int) -> ElasticKv:
    engine = Engine(
        num_blocks=num_blocks,
        num_floor_blocks=4,
        block_size=16,
        max_context_tokens=64,
        max_batch_tokens=64,
        max_sequences=4,
    )

    async def zero_freed() -> None: ...

    return ElasticKv(engine, executor, zero_freed)


def tokens_of(executor: LocalExecutor, num_blocks: int) -> list[int]:
    return generate(executor, Blocks(num_blocks).line(PROMPT, room=NUM_NEW), NUM_NEW)


def test_tokens_are_the_same_after_parking_at_another_size(model_dir: Path, device: str) -> None:
    executor = load(model_dir, device)
    assert (executor.num_blocks, executor.max_blocks) == (NUM_BLOCKS, MOST_BLOCKS)
    expected = tokens_of(executor, NUM_BLOCKS)
    kv = elastic(executor, NUM_BLOCKS)

    async def park_and_wake() -> None:
        await kv.resize(0)
        assert kv.num_bytes == 0
        await kv.resize(MOST_BLOCKS * BLOCK_BYTES)

    asyncio.run(park_and_wake())
    assert not executor.computer.kv_cache.any()
    assert tokens_of(executor, MOST_BLOCKS) == expected


def test_executor_that_loads_parked_serves_once_it_has_a_size(model_dir: Path, device: str) -> None:
    executor = load(model_dir, device, is_parked=True)
    asyncio.run(elastic(executor, 0).resize(NUM_BLOCKS * BLOCK_BYTES))
    assert tokens_of(executor, NUM_BLOCKS) == tokens_of(load(model_dir, device), NUM_BLOCKS)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (BLOCK_BYTES - 1, "hold no block of"),
        ((MOST_BLOCKS + 1) * BLOCK_BYTES, "is more than this worker's ceiling of"),
        (3 * BLOCK_BYTES, "3 blocks holds no sequence of 64 tokens, which needs 4"),
    ],
)
def test_size_out_of_bounds_is_refused(model_dir: Path, num_bytes: int, words: str) -> None:
    kv = elastic(load(model_dir, "cpu"), NUM_BLOCKS)
    with pytest.raises(InvalidRequest, match=words):
        asyncio.run(kv.resize(num_bytes))
    assert kv.num_bytes == NUM_BLOCKS * BLOCK_BYTES


def test_cuda_changes_the_size_of_a_serving_cache_by_parking_only(model_dir: Path) -> None:
    executor = load(model_dir, "cpu")
    executor.is_elastic = False  # as on CUDA
    kv = elastic(executor, NUM_BLOCKS)
    with pytest.raises(InvalidRequest, match="has 16 blocks until the worker is parked"):
        asyncio.run(kv.resize(20 * BLOCK_BYTES))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_parked_executor_returns_device_memory(model_dir: Path) -> None:
    num_bytes = 1 << 30
    executor = load_executor(model_dir, "cuda:0", dtype="float32", kv_cache_bytes=num_bytes)
    kv = elastic(executor, executor.num_blocks)
    free_before, _ = torch.cuda.mem_get_info(0)
    asyncio.run(kv.resize(0))
    assert torch.cuda.mem_get_info(0)[0] - free_before > 0.95 * num_bytes
    asyncio.run(kv.resize(num_bytes // 2))
    tokens_of(executor, NUM_BLOCKS)


# ── pages on the CPU ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_heads", [1, 3, 8], ids=["1/4 page", "3/4 page", "2 pages"])
def test_pages_of_given_back_blocks_are_zero_and_take_no_memory(num_heads: int) -> None:
    layout = KvLayout((KvGroup((0, 1, 2), PagedKv(num_heads, 32, "bfloat16")),))
    cache = allocate_kv_cache(layout, 4000, CPU)
    before = memory_bytes(os.getpid(), "Rss")
    cache.fill_(1.0)
    full = memory_bytes(os.getpid(), "Rss") - before
    assert full > 0.95 * cache.nbytes
    release_blocks(cache, [*range(1000, 2500), *range(3000, 4000)])
    assert full - (memory_bytes(os.getpid(), "Rss") - before) > 0.6 * cache.nbytes
    kept = [*range(1000), *range(2500, 3000)]
    assert (cache[:, :, kept] == 1.0).all()
    page_blocks = -(-4096 // (num_heads * 16 * 32 * 2))  # at the ends of a run pages may stay
    for first, end in ((1000, 2500), (3000, 4000)):
        assert not cache[:, :, first + page_blocks : end - page_blocks].any()


def test_untouched_cache_takes_no_memory() -> None:
    layout = KvLayout((KvGroup((0,), PagedKv(8, 64, "bfloat16")),))
    before = memory_bytes(os.getpid(), "Rss")
    cache = allocate_kv_cache(layout, 8192, CPU)  # 256 MiB
    assert not cache[0, 1, 5000].any()
    assert memory_bytes(os.getpid(), "Rss") - before < 1 << 20


def test_ceiling_without_a_block_is_a_config_error(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="kv_ceiling_bytes 5 holds no block"):
        load_executor(model_dir, dtype="float32", kv_cache_bytes=1 << 20, kv_ceiling_bytes=5)


def test_workers_of_other_sizes_share_one_file_of_weights(tmp_path: Path) -> None:
    write_llama(tmp_path, hidden_size=64, head_dim=16, seed=3)
    before = set(weights_cache_dir().glob("*.packed"))
    load(tmp_path, "cpu")
    (packed,) = set(weights_cache_dir().glob("*.packed")) - before
    built_at = packed.stat().st_ctime_ns
    load(tmp_path, "cpu", max_context_tokens=100, is_parked=True)
    load_executor(tmp_path, dtype="float32", kv_cache_bytes=1 << 20, num_threads=2)
    assert set(weights_cache_dir().glob("*.packed")) - before == {packed}
    assert packed.stat().st_ctime_ns == built_at


def test_context_is_limited_by_the_option_and_the_ceiling(model_dir: Path) -> None:
    assert load(model_dir, "cpu").max_context_tokens == MOST_BLOCKS * 16
    assert load(model_dir, "cpu", max_context_tokens=100).max_context_tokens == 100
