"""Runs a module in a process of its own, whose output is its reply."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping

from services.local.processes.child_processes import die_with_parent
from shared.lifecycle.child_process import send_signal


async def run_module(
    module: str, *arguments: str, environ: Mapping[str, str], given: bytes | None = None
) -> tuple[int, bytes]:
    """Returns the return code and the output of `python -m module arguments`, which gets `given` on
    its input. A cancellation kills the process. Call on the main thread. Raises OSError if it
    cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=DEVNULL if given is None else PIPE,
        stdout=PIPE,
        env=dict(environ),
        preexec_fn=die_with_parent(os.getpid()),
    )
    try:
        output, _ = await process.communicate(given)
    finally:
        send_signal(process, signal.SIGKILL)
    return process.returncode or 0, output
