"""Compiled kernels: who waits for a compiler, and the child that compiles beside a worker."""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path
from threading import Thread
from typing import Any

import numba
import pytest

from kernels.device import IS_INTERPRETED
from kernels.ops import CompilePlan, cpu_host
from shared.engine.executors.loading.cpu_kernels import RowKernels, load_kernels
from tests.support.waiting import until, wait_until

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or IS_INTERPRETED, reason="needs /proc and numba"
)
FIELDS: dict[str, Any] = {
    "dtype": "bfloat16",
    "head_dim": 32,
    "block_size": 16,
    "is_compressed": False,
    "is_blocked": True,
    "has_gelu": False,
}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompilePlan:
    """Of a host whose cache is empty."""
    host = cpu_host()
    if not host.has_kernels:
        pytest.skip("nothing is compiled on this host")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return host.compile_plan(**FIELDS)


def test_start_with_compiled_kernels_waits_for_no_other_model(plan: CompilePlan) -> None:
    ran: list[str] = []

    def started(plan: CompilePlan, name: str) -> Thread:
        thread = Thread(target=load_kernels, args=(plan, lambda: ran.append(name)), daemon=True)
        thread.start()
        return thread

    other = cpu_host().compile_plan(**{**FIELDS, "has_gelu": True})
    load_kernels(plan, lambda: ran.append("first start"))
    with cpu_host().compile_lock():  # as another process that compiles
        waiting = started(other, "another model's first start")
        started(plan, "second start")
        wait_until(lambda: "second start" in ran, timeout_s=20, seen=lambda: ran)
        assert ran == ["first start", "second start"]
    waiting.join(20)
    assert ran == ["first start", "second start", "another model's first start"]


def test_start_that_failed_has_compiled_nothing(plan: CompilePlan) -> None:
    with pytest.raises(ZeroDivisionError):
        load_kernels(plan, lambda: [1 // 0])  # type: ignore[arg-type, return-value]
    assert not plan.marker("steps").exists()


def _children() -> set[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for each in lists for pid in each.read_text().split()}


def test_closed_worker_leaves_no_compiling_process(plan: CompilePlan) -> None:
    async def run() -> None:
        before = _children()
        kernels = RowKernels(plan)
        kernels.start()
        await until(lambda: _children() != before)
        await kernels.close()
        assert _children() == before

    asyncio.run(run())
