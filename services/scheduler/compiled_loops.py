"""Replaces the loops of the cost kernel by machine code, while decisions go on in Python."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import structlog

from services.scheduler import cost_kernel
from shared.background import item_error
from shared.lifecycle.child_process import engine_environ, send_signal

log = structlog.get_logger(__name__)


async def use_compiled_loops() -> None:
    """Compiles in a child process, unless the cache has the code. Where that fails, decisions stay
    in Python: an error in the compiler must not end the scheduler.
    """
    try:
        status = 0 if cost_kernel.is_cached() else await _fill_cache()
        if status == 0:
            await asyncio.to_thread(cost_kernel.load)
        else:
            log.warning("cost_kernel_not_compiled", status=status)
    except BaseException as raised:  # numba and LLVM raise their own errors, a fork may fail
        item_error(raised)
        log.exception("cost_kernel_not_compiled")


async def _fill_cache() -> int:
    """Returns the exit status of the child."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", cost_kernel.FILL_CACHE, env=engine_environ(os.environ)
    )
    try:
        return await child.wait()
    finally:
        send_signal(child, signal.SIGKILL)
