"""The number of KV blocks in a given size, or besides weights and the largest step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigError
from shared.kv_layout import KvLayout

KV_SHARE = 0.9  # the rest: fragmentation, the driver
MAX_BLOCKS = 1 << 20  # the engine has records of each block; 16 M tokens are enough for any batch


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of one device, measured after weights are loaded and the largest step has run.
    `reserved`: those that torch's allocator holds in this process, in use or not.
    """

    free: int
    total: int
    reserved: int = 0


def num_blocks_in(report: MemoryReport, kv_layout: KvLayout) -> int:
    """Returns the blocks in 0.9 of the free memory, at most 1,048,576. Raises ConfigError if
    there are none.
    """
    num_bytes = int(report.free * KV_SHARE)
    num_blocks = num_bytes // kv_layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"{report.free >> 20} MiB of {report.total >> 20} MiB of device memory are free after "
            "weights and the largest step: no room for KV. Use a larger device, --weights "
            "compressed, a smaller --max-batch-tokens, or stop other processes on the device",
            param="kv_cache_bytes",
        )
    return min(num_blocks, MAX_BLOCKS)


def num_blocks_for(
    kv_layout: KvLayout, kv_cache_bytes: int, *, option: str = "kv_cache_bytes"
) -> int:
    """Raises ConfigError if not even one block fits."""
    num_blocks = kv_cache_bytes // kv_layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"{option} {kv_cache_bytes} holds no block of {kv_layout.block_size} tokens "
            f"({kv_layout.block_bytes} bytes)"
        )
    return num_blocks
