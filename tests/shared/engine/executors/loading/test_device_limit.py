from __future__ import annotations

import pytest

from shared.engine.executors.loading.device_limit import (
    LIMITED_KV_SHARE,
    OUTSIDE_BYTES,
    DeviceLimit,
    out_of_memory,
    tried_bytes,
)
from shared.engine.executors.loading.kv_sizing import MemoryReport
from shared.errors import ConfigError
from tests.shared.engine.executors.loading.test_kv_sizing import GIB, LLAMA_8B

TOTAL, WEIGHTS = 80 * GIB, 17 * GIB
BLOCK = LLAMA_8B.block_bytes


def report(free: int = 0) -> MemoryReport:
    return MemoryReport(free=free, total=TOTAL, reserved=WEIGHTS)


@pytest.mark.parametrize("text", ["36GiB", "45%", "0.45"])
def test_kv_gets_what_a_limit_leaves_whatever_others_take(text: str) -> None:
    limit = DeviceLimit.of(text, TOTAL)
    assert limit.num_bytes == 36 * GIB
    left = 36 * GIB - OUTSIDE_BYTES - WEIGHTS - GIB
    for free in (0, 5 * GIB, 60 * GIB):
        num_blocks = limit.num_blocks(report(free), GIB, LLAMA_8B)
        assert num_blocks == int(left * LIMITED_KV_SHARE) // BLOCK


def test_limit_that_is_too_small_says_how_much_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory 17GiB \(17408 MiB\) is 703 MiB too small"):
        DeviceLimit.of("17GiB", TOTAL).num_blocks(report(), 0, LLAMA_8B)
    enough = DeviceLimit.of(f"{17408 + 703}MiB", TOTAL)
    assert enough.num_blocks(report(), 0, LLAMA_8B) == 1
    with pytest.raises(ConfigError, match=r"CUDA alone takes 700 MiB. Use a larger --gpu-memory"):
        DeviceLimit.of("600MiB", TOTAL)
    with pytest.raises(ConfigError, match=r"gpu_memory 90GiB is more than the 81920 MiB of the"):
        DeviceLimit.of("90GiB", TOTAL)
    with pytest.raises(ConfigError, match="gpu_memory 'much' is neither a size"):
        DeviceLimit.of("much", TOTAL)


def test_given_cache_fits_a_limit_or_is_told_what_is_missing() -> None:
    limit = DeviceLimit.of("36GiB", TOTAL)
    most = (limit.torch_bytes - WEIGHTS) // BLOCK
    limit.check_kv(most, report(), 0, LLAMA_8B)
    with pytest.raises(
        ConfigError, match=r"is 2 MiB too small: CUDA takes 700 MiB, weights"
    ) as bad:
        limit.check_kv(most + 1, report(), 0, LLAMA_8B)
    assert ", kv_cache_bytes 18758 MiB. Use a smaller --kv-cache-bytes, a l" in bad.value.message


def test_start_that_runs_out_of_memory_says_whose_it_is() -> None:
    limit = DeviceLimit.of("18GiB", TOTAL)
    own = out_of_memory(report(60 * GIB), limit, 2 * GIB, "the model")
    assert own.message.startswith("gpu_memory 18GiB (18432 MiB) is 1724 MiB too small: the model")
    for each in (limit, None):
        others = out_of_memory(report(100 << 20), each, 200 << 20, "the KV cache")
        assert others.message.startswith(
            "the KV cache takes 200 MiB, and 100 MiB of 81920 MiB of device memory are free. Use a"
        )


def test_what_torch_tried_to_allocate_is_read() -> None:
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB"
    assert tried_bytes(text) == 5 << 29
    assert tried_bytes("out of memory") == 0
