"""The receiving process: writes frames into its cache and returns a digest of what it holds."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

import msgspec
import torch

from benchmarks.gpu_kit.kv_push.cache import DIGESTED_TOKENS, PLACEMENT, PushedCache, PushPlan
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import FrameHeader


class Writer:
    """The sink of the frames: counts tokens, in any order."""

    def __init__(self, cache: PushedCache) -> None:
        self.num_tokens = 0
        self.arrived = asyncio.Event()
        self._cache = cache

    async def frame(self, header: FrameHeader, payload: memoryview) -> None:
        await self._cache.write(header.first_token, header.num_tokens, payload)
        self.num_tokens += header.num_tokens
        self.arrived.set()

    def corrupt(self, header: FrameHeader) -> None:
        raise RuntimeError(f"frame {header.sequence_number} fails its checksum")

    def outside(self) -> None:
        raise AssertionError("the push has no bounds")

    def link_lost(self) -> None:
        self.arrived.set()


def receive(pipe: Connection, plan: PushPlan, device: str) -> None:
    """Sends its address, a digest after each push, and the launches of a dry run."""
    with plan.launching() as driver:
        asyncio.run(_serve(pipe, plan, torch.device(device)))
    pipe.send_bytes(str(0 if driver is None else driver.num_launches).encode())


async def _serve(pipe: Connection, plan: PushPlan, device: torch.device) -> None:
    cache = PushedCache(plan, device, list(reversed(range(plan.num_blocks))))
    server = await KvServer.start(instance_id=b"gpu-kit-receiver", page_lock=cache.page_lock)
    warm = min(DIGESTED_TOKENS, plan.num_tokens)  # loads the kernel, as a worker does at its start
    await cache.write(0, warm, memoryview(bytes(warm * plan.layout.bytes_per_token)))
    writer = Writer(cache)
    server.expect(PLACEMENT, writer)
    pipe.send_bytes(msgspec.msgpack.encode(server.address))
    for repetition in range(1, plan.repetitions + 1):
        while writer.num_tokens < repetition * plan.num_tokens:
            writer.arrived.clear()
            await writer.arrived.wait()
        pipe.send_bytes(await cache.digest())
    await server.close()
    cache.close()
