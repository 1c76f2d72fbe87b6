"""Signals, priorities and environments of child processes."""

from __future__ import annotations

import contextlib
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Secrets are never passed on by accident: a child gets what is named here, and what it needs.
PASSED = (
    *("PATH", "HOME", "USER", "TMPDIR", "TZ", "LANG", "LANGUAGE", "TERM", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "COVERAGE_PROCESS_START"),
    *("HEARTH_CACHE_DIR", "XDG_CACHE_HOME", "HEARTH_LOG_LEVEL", "HEARTH_LOG_FORMAT"),
)
PASSED_PREFIXES = ("LC_", "PYTHON", "MALLOC_", "OMP_")
# Further variables of processes that compute: for devices, compilers and math libraries.
ENGINE_NAMES = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGINGFACE_HUB_CACHE", "CC", "CXX")
ENGINE_PREFIXES = (
    *("CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TRITON_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_"),
    *("NUMBA_", "MKL_", "KMP_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_"),
)
NETWORK_NAMES = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)


def child_environ(
    environ: Mapping[str, str], *, names: Iterable[str] = (), prefixes: Iterable[str] = ()
) -> dict[str, str]:
    """Returns the environment of a child process: the PASSED variables of `environ`, and those that
    are named. This copy of the packages comes first on its path, installed or not.
    """
    passed, starts = {*PASSED, *names}, (*PASSED_PREFIXES, *prefixes)
    found = {name: each for name, each in environ.items() if name in passed}
    found |= {name: each for name, each in environ.items() if name.startswith(starts)}
    return {**found, "PYTHONPATH": python_path(environ), "TOKENIZERS_PARALLELISM": "false"}


def python_path(environ: Mapping[str, str]) -> str:
    """Returns a PYTHONPATH with this copy of the packages, installed or not."""
    inherited = environ.get("PYTHONPATH")
    return str(ROOT) if not inherited else f"{ROOT}{os.pathsep}{inherited}"


def engine_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process that computes."""
    return child_environ(environ, names=ENGINE_NAMES, prefixes=ENGINE_PREFIXES)


def send_signal(process: Process, number: signal.Signals) -> None:
    """Sends a signal to a child that still runs, without polling it.

    The poll in `process.send_signal` would reap an ended child before the event loop does, and the
    loop would report exit status 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # the child has just ended
            os.kill(process.pid, number)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped all of the process. False without /proc."""
    states = {each[0] for each in _thread_stats(pid)}
    return bool(states) and states <= {"T", "t"}


def _thread_stats(pid: int) -> list[list[str]]:
    """Returns the fields of each thread's state, from its third one on; empty if they
    cannot be read.
    """
    try:
        stats = [(each / "stat").read_text() for each in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [each.rpartition(")")[2].split() for each in stats]


class FreezeDetector:
    """Detects a process that does nothing though it should: it is stopped, or waits for ever.

    `can_watch` is False without /proc. It is read once, as it may be asked for with each job.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._last = -1
        self.can_watch = Path(f"/proc/{pid}/task").exists()

    def begin(self) -> None:
        """Forgets what was seen before."""
        self._last = -1

    def is_frozen(self) -> bool:
        """Whether no thread has run or wanted to since the last call. False for a process that
        waits for a core or for a disk, has ended, or cannot be watched: without /proc.
        """
        fields = _thread_stats(self._pid)
        if not fields:
            return False
        before, self._last = self._last, sum(int(each[11]) + int(each[12]) for each in fields)
        return self._last == before and {each[0] for each in fields} <= {"T", "t", "S"}


def lower_priority(native_id: int, niceness: int) -> None:
    """Lowers the priority of a thread, or of a process that has just started, by `niceness` beyond
    the calling thread's. Threads that it starts later inherit it. Does nothing if it has ended.
    """
    with contextlib.suppress(ProcessLookupError):
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, native_id, own + niceness)
