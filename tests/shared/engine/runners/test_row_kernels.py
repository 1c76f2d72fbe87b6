"""The child process that compiles kernels for long prompts beside a running worker."""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path

import numba
import pytest

from kernels.device import IS_INTERPRETED
from kernels.ops import cpu_host
from shared.engine.runners.cpu_kernels import RowKernels

DEADLINE_S = 20.0


def _children() -> set[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for each in lists for pid in each.read_text().split()}


@pytest.mark.skipif(platform.system() != "Linux" or IS_INTERPRETED, reason="needs /proc and numba")
def test_closed_worker_leaves_no_compiling_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = cpu_host()
    if not host.has_kernels:
        pytest.skip("nothing is compiled on this host")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    plan = host.compile_plan(
        dtype="bfloat16",
        head_dim=32,
        block_size=16,
        is_compressed=False,
        is_blocked=True,
        has_plain_attention=True,
        has_masked_attention=False,
        has_gelu=False,
    )

    async def run() -> None:
        before = _children()
        kernels = RowKernels(plan)
        kernels.start()
        async with asyncio.timeout(DEADLINE_S):
            while _children() == before:
                await asyncio.sleep(0.01)
        await kernels.close()
        assert _children() == before

    asyncio.run(run())
