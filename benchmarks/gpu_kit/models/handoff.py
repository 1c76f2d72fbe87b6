"""Pushes KV from one process's cache to another's, over the link that prefill workers use.

Both caches have Llama-3.1-8B's layout, 128 KiB a token. Frames go through shared memory to a
process with a cache of its own (on the second device, if there is one), which writes them, reads
them back and returns their digest. A damaged push fails the part. The same bytes are copied between
the device and pinned and pageable memory, which shows what the link could gain. During the last
push the sending device computes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_kit.session import Row, Session

if TYPE_CHECKING:
    from benchmarks.gpu_kit.kv_push.cache import PushedCache, PushPlan
    from shared.kv_wire.link import PushLink

NUM_TOKENS, REPETITIONS = 8192, 4
DRY_TOKENS = 48
READY_S = 15.0  # timeout of each message of the receiving process
KERNELS = ("gather_blocks", "scatter_blocks")


def run(session: Session) -> None:
    from benchmarks.gpu_kit.kv_push.cache import PushPlan

    num_tokens, repetitions = (DRY_TOKENS, 1) if session.is_dry else (NUM_TOKENS, REPETITIONS)
    plan = PushPlan(session.shapes, num_tokens, repetitions, session.mode)
    ours = theirs = str(session.device)
    if not session.is_dry:
        import torch

        session.need_device()
        ours, theirs = "cuda:0", f"cuda:{torch.cuda.device_count() - 1}"
        _copy(session, plan.num_tokens * plan.layout.bytes_per_token)
    for row in measure(plan, ours, theirs):
        session.add(kernels=KERNELS, **row)


def _copy(session: Session, num_bytes: int) -> None:
    """Rows of pinned and pageable memory."""
    import torch

    device = torch.empty(num_bytes, dtype=torch.uint8, device=session.device)
    for is_pinned in (True, False):
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        for case, target, source in (("to host", host, device), ("to device", device, host)):
            seconds = session.seconds(lambda: target.copy_(source, non_blocking=True), 2)  # noqa: B023
            assert seconds is not None
            rate = round(num_bytes / seconds / 1e9, 2)
            session.add(case=f"copy {case}", is_pinned=is_pinned, gb_s=rate)


def measure(plan: PushPlan, ours: str, theirs: str) -> list[Row]:
    """Returns one row per push. Raises RuntimeError if the received KV differs from that sent."""
    from benchmarks.gpu_kit.kv_push.receiver import receive

    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=receive, args=(other, plan, theirs), daemon=True)
    child.start()
    try:
        return asyncio.run(_send(pipe, plan, ours))
    finally:
        child.kill()
        child.join()


async def _send(pipe: Connection, plan: PushPlan, device: str) -> list[Row]:
    import msgspec
    import torch

    from benchmarks.gpu_kit.kv_push.busy_device import busy
    from benchmarks.gpu_kit.kv_push.cache import PushedCache
    from shared.kv_wire.dialer import Dialer
    from shared.messages import DataPlaneAddress

    cache = PushedCache(plan, torch.device(device), list(range(plan.num_blocks)))
    cache.fill()
    wanted = await cache.digest()
    dialer = Dialer(page_lock=cache.page_lock)
    address = msgspec.msgpack.decode(await _message(pipe), type=DataPlaneAddress)
    link = await dialer.link(address)
    rows = []
    for repetition in range(plan.repetitions):
        is_busy = cache.memory.is_cuda and repetition == plan.repetitions - 1
        with busy(cache.memory.device) if is_busy else nullcontext():
            started = time.perf_counter()
            await _push(link, cache, repetition)
            took_s = time.perf_counter() - started
        if await _message(pipe) != wanted:
            raise RuntimeError("the received KV differs from the sent KV")
        rows.append(_row(plan, took_s) | {"frame_kib": link.frame_bytes >> 10})
        if is_busy:
            rows[-1]["case"] += " while the device computes"
    await dialer.close()
    cache.close()
    if plan.mode != "device":
        rows.append({"case": "receiver", "launches": int(await _message(pipe))})
    return rows


def _row(plan: PushPlan, took_s: float) -> dict[str, Any]:
    num_bytes = plan.num_tokens * plan.layout.bytes_per_token
    row = {"case": f"push of {plan.num_tokens} tokens", "kib": num_bytes >> 10}
    if plan.mode != "device":
        return row
    return {**row, "ms": round(took_s * 1e3, 2), "gb_s": round(num_bytes / took_s / 1e9, 3)}


async def _push(link: PushLink, cache: PushedCache, number: int) -> None:
    """Pushes like the prefill worker: frames of the link's size, and as many at a time."""
    from benchmarks.gpu_kit.kv_push.cache import PLACEMENT
    from shared.kv_wire.link import FrameHeader
    from shared.numerics import Numerics

    layout, num_tokens = cache.layout, cache.plan.num_tokens
    num_each = max(1, min(link.frame_bytes // layout.bytes_per_token, num_tokens // 2))
    starts = iter(list(enumerate(range(0, num_tokens, num_each))))

    async def send(index: int, first: int) -> None:
        count = min(num_each, num_tokens - first)
        header = FrameHeader(
            placement_id=PLACEMENT,
            sequence_number=number * num_tokens + index,
            first_token=first,
            num_tokens=count,
            first_layer=0,
            num_layers=layout.num_layers,
            first_head=0,
            num_heads=layout.state.row[1],
            kv_format=layout.key,
            num_cached_tokens=0,
            payload_bytes=count * layout.bytes_per_token,
            numerics=Numerics("exact", "gpu-kit", layout.dtype, "1"),
        )
        await link.send(header, lambda view: cache.read(first, count, view))

    async def worker() -> None:
        for index, first in starts:
            await send(index, first)

    await asyncio.gather(*(worker() for _ in range(link.frames_under_way)))


async def _message(pipe: Connection) -> bytes:
    """Receives one message. Raises TimeoutError."""

    def receive() -> bytes:
        if not pipe.poll(READY_S):
            raise TimeoutError(f"no message from the receiving process for {READY_S:.0f} s")
        return pipe.recv_bytes()

    return await asyncio.get_running_loop().run_in_executor(None, receive)
