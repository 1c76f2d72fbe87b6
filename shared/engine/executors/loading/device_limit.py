"""What a worker may use of a device that it shares. Pure.

    limit = outside of torch + held by torch (weights, the largest step) + graphs + KV + spare

Only what this process takes counts, so that workers that start at once on one device do not
depend on each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from shared.engine.executors.loading.kv_sizing import MAX_BLOCKS, MemoryReport
from shared.errors import ConfigError
from shared.kv_layout import KvLayout
from shared.sizes import bytes_of, parse_size, parse_size_or_share

# CUDA's context and loaded kernels, which torch's allocator does not count: assumed, not measured.
OUTSIDE_BYTES = 700 << 20
LIMITED_KV_SHARE = (
    0.95  # of what is left; the rest is for steps whose tensors do not fit the gaps of others
)
LOWER = (
    "a larger --gpu-memory, --weights compressed, a smaller --max-batch-tokens or --max-sequences"
)
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+ [KMGT]iB)")


@dataclass(frozen=True, slots=True)
class DeviceLimit:
    """The bytes of a device of `total` bytes that a worker may use. `text` is as given."""

    text: str
    num_bytes: int
    total: int

    @classmethod
    def of(cls, text: str, total: int) -> Self:
        """Raises ConfigError for a limit that is none, or more than the device has."""
        try:
            num_bytes = bytes_of(parse_size_or_share(text), total)
        except ConfigError as error:
            raise ConfigError(f"gpu_memory {error.message}", param="gpu_memory") from None
        limit = cls(text, num_bytes, total)
        if num_bytes > total:
            raise ConfigError(
                f"gpu_memory {text} is more than the {_mib(total)} of the device",
                param="gpu_memory",
            )
        if limit.torch_bytes <= 0:
            raise limit.too_small(-limit.torch_bytes, f"CUDA alone takes {_mib(OUTSIDE_BYTES)}")
        return limit

    @property
    def torch_bytes(self) -> int:
        """What torch's allocator may hold."""
        return self.num_bytes - OUTSIDE_BYTES

    def num_blocks(self, report: MemoryReport, graph_bytes: int, kv_layout: KvLayout) -> int:
        """Returns the blocks in 0.95 of what is left, at most 1,048,576. Raises ConfigError if
        there are none.
        """
        left = self.torch_bytes - report.reserved - graph_bytes
        num_blocks = int(left * LIMITED_KV_SHARE) // kv_layout.block_bytes
        if num_blocks < 1:
            missing = int(kv_layout.block_bytes / LIMITED_KV_SHARE) - left
            raise self.too_small(missing, _parts(report, graph_bytes) + "; none is left for KV")
        return min(num_blocks, MAX_BLOCKS)

    def check_kv(
        self, num_blocks: int, report: MemoryReport, graph_bytes: int, kv_layout: KvLayout
    ) -> None:
        """Raises ConfigError if a cache of this size does not fit."""
        num_bytes = num_blocks * kv_layout.block_bytes
        missing = num_bytes + report.reserved + graph_bytes - self.torch_bytes
        if missing > 0:
            parts = _parts(report, graph_bytes)
            reason = f"{parts}, kv_cache_bytes {_mib(num_bytes)}"
            raise self.too_small(missing, reason, "a smaller --kv-cache-bytes, ")

    def too_small(self, missing: int, reason: str, first: str = "") -> ConfigError:
        """Returns the error of a limit that lacks `missing` bytes; `first` is the best advice."""
        return ConfigError(
            f"gpu_memory {self.text} ({_mib(self.num_bytes)}) is {_mib(missing)} too small: "
            f"{reason}. Use {first}{LOWER}",
            param="gpu_memory",
        )


def out_of_memory(
    report: MemoryReport, limit: DeviceLimit | None, num_bytes: int, what: str
) -> ConfigError:
    """Returns the error of a start for which torch could not have `num_bytes` more, for `what`."""
    if limit is not None and num_bytes + report.reserved > limit.torch_bytes:
        missing = num_bytes + report.reserved - limit.torch_bytes
        takes = (
            f"{what} takes {_mib(num_bytes)} beside the {_mib(report.reserved)} that torch holds"
        )
        return limit.too_small(missing, f"{takes}, and CUDA {_mib(OUTSIDE_BYTES)}")
    return ConfigError(
        f"{what} takes {_mib(num_bytes)}, and {_mib(report.free)} of {_mib(report.total)} of "
        "device memory are free. Use a larger device, --weights compressed, a smaller "
        "--max-batch-tokens, --kv-cache-bytes or --gpu-memory, or stop other processes on it",
        param="device",
    )


def tried_bytes(message: str) -> int:
    """Returns what torch tried to allocate, by the message of its error; 0 if that is not told."""
    found = _TRIED.search(message)
    return 0 if found is None else parse_size(found[1])


def _parts(report: MemoryReport, graph_bytes: int) -> str:
    graphs = f", graphs {_mib(graph_bytes)}" if graph_bytes else ""
    held = f"weights and the largest step {_mib(report.reserved)}"
    return f"CUDA takes {_mib(OUTSIDE_BYTES)}, {held}{graphs}"


def _mib(num_bytes: int) -> str:
    """Rounded up: as much more is enough."""
    return f"{-(-num_bytes // (1 << 20))} MiB"
