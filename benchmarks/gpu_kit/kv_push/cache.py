"""One process's end of a push: a KV cache of a model's layout, without the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from benchmarks.gpu_kit.session import Mode
from benchmarks.gpu_kit.shapes import Shapes
from shared.engine.executors.cuda.copy_stream import CopyStream
from shared.engine.executors.cuda.cuda_device import cuda_device
from shared.engine.executors.cuda.page_lock import CudaPageLock
from shared.engine.kv.kv_cache import allocate_kv_cache
from shared.engine.kv.kv_copies import KvCopies
from shared.engine.step import KvRun
from shared.kv_layout import KvLayout, PagedKv, group_layers
from shared.kv_wire.link import PageLock

PLACEMENT = b"gpu-kit---------"
DTYPE = "bfloat16"
DIGESTED_TOKENS = 64  # read at a time


@dataclass(frozen=True)
class PushPlan:
    """The parameters that both processes use. For `mode`, see session.py."""

    shapes: Shapes
    num_tokens: int
    repetitions: int
    mode: Mode = "device"

    @property
    def layout(self) -> KvLayout:
        shapes = self.shapes
        state = PagedKv(shapes.kv_heads, shapes.head_dim, DTYPE)
        size = shapes.block_size
        return KvLayout(group_layers([state] * shapes.layers), size, hash_tokens=size)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.shapes.block_size)

    def launching(self) -> AbstractContextManager[Any]:
        """Where launches go: to the device, or to a fake driver."""
        if self.mode == "device":
            return nullcontext()
        from benchmarks.gpu_kit.dry.dry_device import dry_device

        return dry_device("ttir" if self.mode == "dry" else "cubin")


class PushedCache:
    """A KV cache with one sequence in the blocks of `table`. As in a worker, one thread copies."""

    def __init__(self, plan: PushPlan, device: torch.device, table: list[int]) -> None:
        bind = _binder(device)
        bind()  # the cache is filled, and its stream made, by this thread
        self.plan, self.layout, self.table = plan, plan.layout, table
        memory = allocate_kv_cache(self.layout, plan.num_blocks, device)
        self.memory = memory
        self._copies = KvCopies(memory, self.layout)
        self.page_lock: PageLock | None = None
        self._stream: CopyStream | None = None
        if device.type == "cuda":
            self.page_lock = CudaPageLock(cuda_device(device))
            self._stream = CopyStream(cuda_device(device))
        self._thread = ThreadPoolExecutor(1, "kv-copy", bind)

    def fill(self) -> None:
        """Fills the cache with random numbers."""
        for slot in self.memory.unbind(0):
            slot.normal_()
        if self._stream is not None:
            torch.cuda.synchronize()

    async def read(self, first: int, count: int, out: memoryview) -> None:
        await self._on_thread(self._copies.read_kv, first, count, out)

    async def write(self, first: int, count: int, payload: memoryview) -> None:
        await self._on_thread(self._copies.write_kv, first, count, payload)

    async def digest(self) -> bytes:
        """Returns a digest of the KV of all tokens, in their order."""
        found, num_tokens = xxhash.xxh3_128(), self.plan.num_tokens
        view = memoryview(bytearray(DIGESTED_TOKENS * self.layout.bytes_per_token))
        for first in range(0, num_tokens, DIGESTED_TOKENS):
            count = min(DIGESTED_TOKENS, num_tokens - first)
            part = view[: count * self.layout.bytes_per_token]
            await self.read(first, count, part)
            found.update(part)
        return found.digest()

    def close(self) -> None:
        self._thread.shutdown()

    async def _on_thread(
        self, copy: Callable[[KvRun, memoryview], None], first: int, count: int, data: memoryview
    ) -> None:
        call = partial(copy, KvRun(self.table, first, count), data)
        if self._stream is not None:
            call = partial(self._stream.copy, self._stream.delivered, call)
        await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _binder(device: torch.device) -> Callable[[], None]:
    return lambda: torch.cuda.set_device(device) if device.type == "cuda" else None
