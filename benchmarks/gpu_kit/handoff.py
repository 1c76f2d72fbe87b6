"""Transfers a prompt's KV from one process's cache to another's, over prefill workers' push link.

The model has Llama-3.1-8B's KV (128 KiB per token) and little else: dummy weights, a hidden size of
256. The prompt is computed here; frames go through shared memory to a process with a separate
runner (on the second device, if there is one), which writes them to its cache, reads them back and
returns their digest. A damaged push fails the part.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit import roofline
from benchmarks.gpu_kit.model_8b import folder_of, loader, prefill_step
from benchmarks.gpu_kit.session import Session
from shared.engine.runner import KvRun

PLACEMENT = b"gpu-kit---------"
NUM_TOKENS, REPETITIONS = 8192, 3
CHUNK = 2048
READY_S = 60.0
SMALL = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 1024, "eos_token_id": 2}
CONFIG = roofline.CONFIG | SMALL


def run(session: Session) -> None:
    loader(session)
    import torch

    receiver = f"cuda:{min(1, torch.cuda.device_count() - 1)}"
    with folder_of(CONFIG) as folder:
        for row in measure(folder, "cuda:0", receiver, NUM_TOKENS, REPETITIONS):
            session.add(**row)


def measure(
    folder: Path, sender: str, receiver: str, num_tokens: int, repetitions: int
) -> list[dict[str, Any]]:
    """Returns one row per push. Raises RuntimeError if the received KV differs from that sent."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, str(folder), receiver, num_tokens, repetitions)
    child = context.Process(target=_receive, args=arguments, daemon=True)
    child.start()
    try:
        return asyncio.run(
            _send(ours, _runner(folder, sender, num_tokens), num_tokens, repetitions)
        )
    finally:
        child.kill()
        child.join()


def _runner(folder: Path, device: str, num_tokens: int) -> Any:
    from shared.engine.runners.load import load_runner

    config_bytes = 2 * roofline.kv_bytes_per_token(CONFIG)  # for FP32, the widest
    return load_runner(
        folder,
        device=device,
        load_format="dummy",
        kv_cache_bytes=(num_tokens + 64) * config_bytes,
        max_batch_tokens=min(CHUNK, num_tokens),
    )


async def _send(pipe: Connection, runner: Any, num_tokens: int, repetitions: int) -> list[Any]:
    import msgspec

    from shared.kv_wire.dialer import Dialer
    from shared.messages import DataPlaneAddress

    block_size = runner.kv_layout.block_size
    for start in range(0, num_tokens, CHUNK):
        await runner.run(prefill_step(start, min(CHUNK, num_tokens - start), block_size))
    table = list(range(-(-num_tokens // block_size)))
    wanted = await _digest(runner, table, num_tokens)
    address = msgspec.msgpack.decode(await _message(pipe), type=DataPlaneAddress)
    dialer = Dialer()
    link = await dialer.link(address)
    rows = []
    for repetition in range(repetitions):
        started = time.perf_counter()
        await _push(link, runner, table, num_tokens, repetition)
        took_s = time.perf_counter() - started
        if await _message(pipe) != wanted:
            raise RuntimeError("the received KV differs from the sent KV")
        num_bytes = num_tokens * runner.kv_layout.bytes_per_token
        rows.append(
            {
                "case": f"push of {num_tokens} tokens",
                "mib": num_bytes >> 20,
                "ms": round(took_s * 1e3, 2),
                "gb_s": round(num_bytes / took_s / 1e9, 3),
            }
        )
    await dialer.close()
    await runner.close()
    return rows


async def _push(link: Any, runner: Any, table: list[int], num_tokens: int, number: int) -> None:
    """Pushes like the prefill worker: frames of FRAME_BYTES, FRAMES_UNDER_WAY at a time."""
    from shared.kv_wire.link import FRAME_BYTES, FRAMES_UNDER_WAY, FrameHeader

    kv_layout = runner.kv_layout
    num_each = max(1, FRAME_BYTES // kv_layout.bytes_per_token)
    starts = iter(list(enumerate(range(0, num_tokens, num_each))))

    async def send(index: int, first: int) -> None:
        count = min(num_each, num_tokens - first)
        header = FrameHeader(
            placement_id=PLACEMENT,
            sequence_number=number * num_tokens + index,
            first_token=first,
            num_tokens=count,
            first_layer=0,
            num_layers=kv_layout.num_layers,
            first_head=0,
            num_heads=kv_layout.state.row[1],
            kv_format=kv_layout.key,
            num_cached_tokens=0,
            payload_bytes=count * kv_layout.bytes_per_token,
            numerics=runner.numerics,
        )

        async def fill(view: memoryview) -> None:
            await runner.read_kv(KvRun(table, first, count), view)

        await link.send(header, fill)

    async def worker() -> None:
        for index, first in starts:
            await send(index, first)

    await asyncio.gather(*(worker() for _ in range(FRAMES_UNDER_WAY)))


async def _message(pipe: Connection) -> bytes:
    """Receives one message. Raises TimeoutError."""

    def receive() -> bytes:
        if not pipe.poll(READY_S):
            raise TimeoutError(f"no message from the receiving process for {READY_S:.0f} s")
        return pipe.recv_bytes()

    return await asyncio.get_running_loop().run_in_executor(None, receive)


async def _digest(runner: Any, table: list[int], num_tokens: int) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    view = bytearray(64 * runner.kv_layout.bytes_per_token)
    for first in range(0, num_tokens, 64):
        count = min(64, num_tokens - first)
        part = memoryview(view)[: count * runner.kv_layout.bytes_per_token]
        await runner.read_kv(KvRun(table, first, count), part)
        digest.update(part)
    return digest.digest()


class Writer:
    """The sink of the frames: counts tokens, in any order."""

    def __init__(self, runner: Any, table: list[int]) -> None:
        self.num_tokens = 0
        self.arrived = asyncio.Event()
        self._runner, self._table = runner, table

    async def frame(self, header: Any, payload: memoryview) -> None:
        await self._runner.write_kv(
            KvRun(self._table, header.first_token, header.num_tokens), payload
        )
        self.num_tokens += header.num_tokens
        self.arrived.set()

    def corrupt(self, header: Any) -> None:
        raise RuntimeError(f"frame {header.sequence_number} fails its checksum")

    def link_lost(self) -> None:
        self.arrived.set()


def _receive(pipe: Connection, folder: str, device: str, num_tokens: int, repetitions: int) -> None:
    asyncio.run(_serve(pipe, _runner(Path(folder), device, num_tokens), num_tokens, repetitions))


async def _serve(pipe: Connection, runner: Any, num_tokens: int, repetitions: int) -> None:
    import msgspec

    from shared.kv_wire.kv_server import KvServer

    table = list(reversed(range(-(-num_tokens // runner.kv_layout.block_size))))
    server = await KvServer.start(instance_id=b"gpu-kit-receiver")
    writer = Writer(runner, table)
    server.expect(PLACEMENT, writer)
    pipe.send_bytes(msgspec.msgpack.encode(server.address))
    for repetition in range(1, repetitions + 1):
        while writer.num_tokens < repetition * num_tokens:
            writer.arrived.clear()
            await writer.arrived.wait()
        pipe.send_bytes(await _digest(runner, table, num_tokens))
    await server.close()
    await runner.close()
