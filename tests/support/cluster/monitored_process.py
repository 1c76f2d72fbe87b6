"""A monitored service process: `python -m tests.support.cluster.monitored_process FOLDER COMMAND`.

It is `python -m services COMMAND ...`, with two differences. On SIGUSR1 a thread writes what the
process holds to FOLDER: live objects of Hearth's classes, and tasks. And with HEARTH_CHAOS_STEP_S
set, a worker computes with the timing engine, so that a row takes a second of formula tokens
instead of a minute of a model's; everything else is real.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import msgspec

from tests.support.services.forked_pools import use_forked_pools

PR_SET_PDEATHSIG = 1
STEP_VARIABLE = "HEARTH_CHAOS_STEP_S"


def main() -> None:
    _die_with_parent()
    folder = Path(sys.argv.pop(1))
    use_forked_pools()
    _watch(folder)
    step_s, command = os.environ.get(STEP_VARIABLE), sys.argv[1]
    if step_s is not None and command in ("prefill", "decode", "worker"):
        from tests.support.cluster.timing import run_timing_worker

        run_timing_worker(sys.argv.pop(1), float(step_s))
    else:
        from services.__main__ import main as run

        run()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(folder: Path) -> None:
    """Every thread inherits the mask, so that only those receive the signals that wait for them:
    this one, and the one of `tests/support/cluster/timing.py`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    threading.Thread(target=_write_census_on_signal, args=(folder,), daemon=True).start()


def _write_census_on_signal(folder: Path) -> None:
    while True:
        signal.sigwait({signal.SIGUSR1})
        draft = folder / f"{os.getpid()}.draft"
        draft.write_bytes(msgspec.json.encode(_census()))
        draft.rename(folder / f"{os.getpid()}.json")


def _census() -> dict[str, int]:
    """Returns the number of live objects of each of Hearth's classes, and of tasks of
    each coroutine.
    """
    gc.collect()
    living: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if str(kind.__module__).startswith(("services.", "shared.")):
            living[f"{kind.__module__}.{kind.__qualname__}"] += 1
        elif isinstance(each, asyncio.Task) and not each.done():
            living[f"task {getattr(each.get_coro(), '__qualname__', '?')}"] += 1
    return dict(living)


if __name__ == "__main__":
    main()
