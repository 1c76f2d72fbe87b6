"""Captures of graphs beside what else a worker does: steps, copies, failures, a parked cache.

    all            the graphs of an idle worker: their memory, and the slowest step meanwhile
    during copies  some while KV is copied, memory is page-locked, and allocations fail
    failed         a capture that waits for the device, and the next one
    parked         the KV cache goes and comes again, and steps have graphs

A few layers of the 8B shape. In each case the tokens are those of launches.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_kit.failures import raise_for, recorded
from benchmarks.gpu_kit.models.model_8b import folder_of
from benchmarks.gpu_kit.session import Session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shared.engine.executors.cuda.cuda_executor import CudaExecutor
    from shared.engine.executors.cuda.decode_graphs import DecodeGraphs
    from shared.engine.step import StepInputs

LAYERS = {"device": 4, "dry": 1, "compile": 2}
BATCH, CONTEXT = 8, 1000
LOCKED_BYTES = 64 << 20
PAUSE_S = 0.02  # the driver serves one call at a time, and page-locking takes long
TOO_MANY_BYTES = 1 << 42
WAIT_S = 5.0  # for the captures of an idle worker


def run(session: Session) -> None:
    """Raises RuntimeError if a case fails."""
    from benchmarks.gpu_kit.model_steps.loading import load

    config = session.shapes.config | {"num_hidden_layers": LAYERS[session.mode]}
    with folder_of(config) as folder:
        executor, _ = load(session, folder, "exact")
    asyncio.run(_Cases(session, executor).run())  # type: ignore[arg-type]


class _Cases:
    def __init__(self, session: Session, executor: CudaExecutor) -> None:
        from benchmarks.gpu_kit.model_steps.inputs import decode_step

        self._session, self._executor = session, executor
        batch, context = (1, 20) if session.is_dry else (BATCH, CONTEXT)
        self._step: StepInputs = decode_step(batch, context, executor.kv_layout.block_size)
        self._failed: list[str] = []
        self._wanted: list[int] = []

    async def run(self) -> None:
        computer = self._executor.computer
        if self._session.is_dry:
            await self._executor.run(self._step)
            await self._executor.close()
            return
        graphs, computer.graphs = computer.graphs, None
        self._wanted = await self._tokens()
        computer.graphs = graphs
        for name, case in {
            "all": self._all,
            "during copies": self._during_copies,
            "failed": self._failed_capture,
            "parked": self._parked,
        }.items():
            with recorded(self._session, name, self._failed):
                await case()
                assert await self._tokens() == self._wanted, "the tokens are others"
        await self._executor.close()
        raise_for(self._failed)

    @property
    def _graphs(self) -> DecodeGraphs:
        graphs = self._executor.computer.graphs
        assert graphs is not None, "a CUDA executor has graphs"
        return graphs

    async def _tokens(self) -> list[int]:
        return (await self._executor.run(self._step)).token_ids

    async def _all(self) -> None:
        """The captures of an idle worker, with steps between and during them."""
        import torch

        free, total = torch.cuda.mem_get_info()
        began_at, took = time.perf_counter(), [0.0]
        self._executor._captures.begin_step()
        self._executor._captures.end_step()
        while self._executor.computer.has_graphs_left():
            await asyncio.sleep(0.037)
            started = time.perf_counter()
            await self._tokens()
            took.append(time.perf_counter() - started)
            if started > began_at + WAIT_S:
                break
        used = free - torch.cuda.mem_get_info()[0]
        self._session.add(
            case="all",
            **self._counts(),
            seconds=round(time.perf_counter() - began_at, 2),
            gib=round(used / 2**30, 3),
            of_memory=round(used / total, 4),
            is_whole=not self._executor.computer.has_graphs_left(),
            slowest_step_ms=round(max(took) * 1e3, 2),
        )

    async def _during_copies(self) -> None:
        """Captures while other threads use the device."""
        self._executor.computer.forget_graphs()
        beside = [asyncio.ensure_future(self._repeat(self._copy))]
        beside += [
            asyncio.ensure_future(self._repeat(partial(asyncio.to_thread, each)))
            for each in (self._lock, _allocate_too_much)
        ]
        began_at, lag = time.perf_counter(), 0.0
        for _ in range(8):
            await self._executor._capture_next()
            started = time.perf_counter()
            await asyncio.sleep(0)
            lag = max(lag, time.perf_counter() - started)
        seconds = time.perf_counter() - began_at
        for each in beside:
            each.cancel()
        found = await asyncio.gather(*beside, return_exceptions=True)
        errors = [repr(each) for each in found if not isinstance(each, asyncio.CancelledError)]
        self._session.add(
            case="during copies",
            **self._counts(),
            seconds=round(seconds, 2),
            loop_lag_ms=round(lag * 1e3, 2),
            rounds=self._rounds,
            errors=errors,
        )
        assert not errors, errors

    _rounds = 0

    async def _repeat(self, call: Callable[[], Awaitable[None]]) -> None:
        while True:
            await call()
            self._rounds += 1
            await asyncio.sleep(PAUSE_S)

    async def _copy(self) -> None:
        """Copies KV to the host and back."""
        from shared.engine.step import KvRun

        layout = self._executor.kv_layout
        run = KvRun(list(range(1000, 1064)), 0, 64 * layout.block_size)
        payload = memoryview(bytearray(64 * layout.block_bytes))
        await self._executor.read_kv(run, payload)
        await self._executor.write_kv(run, payload)

    def _lock(self) -> None:
        lock = self._executor.page_lock
        assert lock is not None
        with mmap.mmap(-1, LOCKED_BYTES) as memory, memoryview(memory) as view:
            unlock = lock.lock(view)
            assert unlock is not None, "the memory was not locked"
            unlock()

    async def _failed_capture(self) -> None:
        """Waits within a capture; another one must succeed after it."""
        import torch

        device: Any = self._graphs._device
        number = torch.zeros(4, device="cuda")
        before = torch.cuda.memory_reserved()

        def attempt() -> str:
            with suppress(RuntimeError):
                device.capture(partial(lambda: number.sum().item()))
                return "a wait was captured"
            return ""

        assert not (error := await self._executor._launch(attempt)), error
        self._executor.computer.forget_graphs()
        await self._executor._capture_next()
        replayed = self._graphs.num_replayed
        torch.cuda.empty_cache()
        self._session.add(
            case="failed",
            **self._counts(),
            mib_kept=(torch.cuda.memory_reserved() - before) >> 20,
        )
        for _ in range(3):
            assert await self._tokens() == self._wanted
        assert self._graphs.num_replayed > replayed, "no graph after a failed capture"

    async def _parked(self) -> None:
        executor, seconds = self._executor, []
        for num_blocks in (0, executor.num_blocks):
            started = time.perf_counter()
            await executor.resize_kv(num_blocks)
            seconds.append(round(time.perf_counter() - started, 3))
        first = time.perf_counter()
        replayed = self._graphs.num_replayed
        for _ in range(3):
            await self._tokens()
        self._session.add(
            case="parked",
            park_s=seconds[0],
            wake_s=seconds[1],
            three_steps_s=round(time.perf_counter() - first, 3),
            replayed=self._graphs.num_replayed - replayed,
        )
        # the cache was lost: its keys are zeros, and so the tokens others
        self._wanted = await self._tokens()

    def _counts(self) -> dict[str, Any]:
        found = self._graphs._graphs.values()
        return {"graphs": len(found), "not_captured": sum(each is None for each in found)}


def _allocate_too_much() -> None:
    import torch

    with suppress(torch.OutOfMemoryError):
        torch.empty(TOO_MANY_BYTES, dtype=torch.uint8, device="cuda")
