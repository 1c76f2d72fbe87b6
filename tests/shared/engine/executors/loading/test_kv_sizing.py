from __future__ import annotations

import pytest

from shared.engine.executors.loading.kv_sizing import MAX_BLOCKS, MemoryReport, num_blocks_in
from shared.errors import ConfigError
from shared.kv_layout import KvGroup, KvLayout, PagedKv

LLAMA_8B = KvLayout((KvGroup(tuple(range(32)), PagedKv(8, 128, "bfloat16")),))  # 128 KiB a token
GIB = 1 << 30


def test_nine_tenths_of_free_memory_become_blocks() -> None:
    """An H200 of 140 GiB with 16 GiB of weights and steps holds 912,000 tokens."""
    report = MemoryReport(free=124 * GIB, total=140 * GIB)
    num_blocks = num_blocks_in(report, LLAMA_8B)
    assert num_blocks == int(124 * GIB * 0.9) // (16 * 128 * 1024)
    assert num_blocks * 16 > 850_000


def test_number_of_blocks_is_at_most_max_blocks() -> None:
    tiny = KvLayout((KvGroup((0,), PagedKv(1, 16, "bfloat16")),))
    assert num_blocks_in(MemoryReport(124 * GIB, 140 * GIB), tiny) == MAX_BLOCKS


def test_full_device_error_suggests_compressed_weights() -> None:
    report = MemoryReport(free=2 << 20, total=140 * GIB)
    with pytest.raises(ConfigError, match=r"2 MiB of 143360 MiB .* --weights compressed"):
        num_blocks_in(report, LLAMA_8B)
