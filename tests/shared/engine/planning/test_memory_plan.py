from __future__ import annotations

import msgspec
import pytest

from shared.engine.model_config.model_config import LayerConfig, ModelConfig, RopeConfig
from shared.engine.planning.memory_plan import (
    MemoryLimit,
    num_kv_tokens,
    num_sequences,
    plan_memory,
    size_text,
)
from shared.errors import ConfigError
from shared.kv_layout import Window

# Llama 3.1 8B
CONFIG = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    activation="silu",
    attention_scale=128**-0.5,
    layers=(LayerConfig(),) * 32,
    ropes=(RopeConfig(theta=5e5, rotary_dim=128),),
    has_tied_embeddings=False,
)
GIB = 1 << 30


def test_published_sizes_of_llama_8b() -> None:
    """8.03 B weights, and 128 KiB of KV for each token in BF16."""
    (rank,) = plan_memory(
        CONFIG, tp=1, pp=1, item_bytes=2, limit=MemoryLimit(memory_bytes=80 * GIB)
    )
    assert rank.weight_bytes == 2 * 8_030_261_248
    assert rank.kv_bytes_per_token == 128 << 10
    assert rank.num_kv_tokens is not None
    used = rank.weight_bytes + rank.workspace_bytes + rank.num_kv_tokens * (128 << 10) / 0.9
    assert used == pytest.approx(80 * GIB, rel=1e-4)


@pytest.mark.parametrize(("block_size", "count"), [(16, 8), (64, 2)])
def test_sequences_hold_whole_blocks(block_size: int, count: int) -> None:
    """A sequence of one token holds a block; its window may begin within another."""
    kv_bytes = 128 * (128 << 10)  # tokens
    limit = MemoryLimit(memory_bytes=80 * GIB, kv_bytes=kv_bytes)
    ranks = plan_memory(CONFIG, tp=1, pp=1, item_bytes=2, block_size=block_size, limit=limit)
    assert num_sequences(ranks, 1) == (count, count)
    windows = (LayerConfig(reach=Window(32)), LayerConfig()) * 16
    config = msgspec.structs.replace(CONFIG, layers=windows)
    (rank,) = plan_memory(config, tp=1, pp=1, item_bytes=2, block_size=block_size, limit=limit)
    assert rank.kv is not None
    held = 512 + (2 * block_size if block_size > 32 else 32 + block_size)
    assert rank.kv.sequence_bytes(512) == held * (64 << 10)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 2), (8, 4)])
def test_each_rank_needs_its_share(tp: int, pp: int) -> None:
    ranks = plan_memory(CONFIG, tp=tp, pp=pp, item_bytes=2, limit=MemoryLimit(memory_bytes=None))
    assert [(each.stage, each.tp_rank) for each in ranks] == [
        (stage, rank) for stage in range(pp) for rank in range(tp)
    ]
    whole = 2 * 8_030_261_248
    assert whole <= sum(each.weight_bytes for each in ranks) <= 1.001 * whole
    assert sum(each.kv_bytes_per_token for each in ranks) == 128 << 10
    assert num_kv_tokens(ranks) is None


def test_fullest_rank_bounds_the_cache() -> None:
    ranks = plan_memory(CONFIG, tp=1, pp=2, item_bytes=2, limit=MemoryLimit(memory_bytes=16 * GIB))
    tokens = [each.num_kv_tokens or 0 for each in ranks]
    assert tokens[0] != tokens[1]
    assert num_kv_tokens(ranks) == min(tokens)


def test_rank_whose_part_does_not_fit_is_an_error() -> None:
    message = r"rank 0 of stage 0 needs 15.0 GiB for weights .* 8.0 GiB are too few"
    with pytest.raises(ConfigError, match=message):
        plan_memory(CONFIG, tp=1, pp=1, item_bytes=2, limit=MemoryLimit(memory_bytes=8 * GIB))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1 << 10, "1.0 KiB"), (300 << 20, "300 MiB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
